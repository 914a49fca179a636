"""Continue and vary jobs on this machine: resume, rerun with changes, and a config that starts from another job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import save_checkpoint
from tests.integration.local.test_jobs import SMALL, losses
from tests.integration.test_mingpt import ITERATION, MINGPT

TRAIN = ("--nodes", "2", "--gpus-per-node", "1", *SMALL, "-o", "Engine.save_load.save_steps=20", "--env", "MY_NAME=a b")


@pytest.fixture
def killed(jobs) -> str:
    """A job of 400 steps that was killed after some of them, with its own flags."""
    jobs.gptctl("init")
    job = jobs.submit(*TRAIN, "-o", "Engine.max_steps=400")
    jobs.await_text(job, 0, "global step 50,")
    os.kill(jobs.pid(job, 1), signal.SIGKILL)
    assert jobs.wait(job, 60) == "FAILED"
    return job


@pytest.fixture
def stopped(jobs) -> str:
    """A job of 400 steps with a checkpoint. Its interpreter is a shell script: only gptctl's side is looked at."""
    jobs.gptctl("init")
    job = jobs.submit("--cluster", "./quick.yaml", *TRAIN, "-o", "Engine.max_steps=400")
    assert jobs.wait(job) == "COMPLETED"
    save_checkpoint(jobs.run_dir(job) / "output", 40)
    return job


def values_of(jobs, job: str) -> dict[str, tuple[object, str]]:
    rows = json.loads(jobs.gptctl("show", job, "--json").stdout)["values"]
    return {row["key"]: (row["value"], row["origin"]) for row in rows}


def test_resume_is_the_same_run(jobs, killed: str, tmp_path: Path) -> None:
    """The oracle is the same job, undisturbed: the losses of both parts are equal, step by step. The user's config has
    changed since, and gptctl is called from another folder."""
    before = values_of(jobs, killed)
    (jobs.folder / "config.yaml").write_text("Model: {num_layers: 7}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    answer = jobs.gptctl("resume", killed, "--wait", "--json", cwd=elsewhere)
    resumed = json.loads(answer.stdout)
    assert resumed["state"] == "COMPLETED", answer.stderr
    assert resumed["continues"] == killed
    assert f"continues {killed} from step" in answer.stderr
    assert "with the same config" in answer.stderr
    for job in (killed, resumed["job"]):
        assert json.loads(jobs.gptctl("show", job, "--json").stdout)["lineage"] == [killed, resumed["job"]]
    assert f"{killed} → {resumed['job']}" in jobs.gptctl("show", killed).stdout
    assert " from " in jobs.gptctl("list").stdout
    now = values_of(jobs, resumed["job"])
    assert {key for key in now if now[key] != before[key]} == {"Engine.save_load.ckpt_dir"}
    assert now["Launch.env.MY_NAME"] == ("a b", "--env MY_NAME")
    whole = json.loads(jobs.gptctl("rerun", killed, "--wait", "--json", cwd=elsewhere).stdout)
    expected, second = losses(jobs.log(whole["job"], 0)), losses(jobs.log(resumed["job"], 0))
    assert min(second) % 20 == 1
    assert {**losses(jobs.log(killed, 0)), **second} == expected
    assert max(expected) == 400


def test_variations_are_derived_again(jobs, stopped: str) -> None:
    """The oracle is a fresh submit of the same file with the same flags and the change."""
    changes = ("-o", "Engine.max_steps=500", "--nodes", "1")
    fresh = json.loads(
        jobs.gptctl("submit", "--cluster", "./quick.yaml", *TRAIN, *changes, "--dry-run", "--json").stdout
    )["plan"]
    again = json.loads(jobs.gptctl("rerun", stopped, *changes, "--dry-run", "--json").stdout)["plan"]
    same = ("world", "nodes", "program", "env", "python", "work_dir", "max_restarts")
    assert [again[name] for name in same][:2] == [fresh[name] for name in same][:2] == [1, 1]
    assert [again[name] for name in same[3:]] == [fresh[name] for name in same[3:]]
    answer = jobs.gptctl("resume", stopped, *changes, "--dry-run")
    assert answer.returncode == 0
    for words in ("world: 2 ranks (2 × 1) → 1 rank (1 × 1)", "Engine.max_steps: 400 → 500", "decay_steps: 400 → 500"):
        assert words in answer.stderr


def test_a_config_that_starts_from_another_job(jobs, stopped: str) -> None:
    asked = ("submit", "--cluster", "./quick.yaml", "--resume", stopped, *SMALL, "--dry-run")
    answer = jobs.gptctl(*asked)
    assert answer.returncode == 0, answer.stderr
    assert f"continues {stopped} from step" in answer.stderr
    assert "world: 2 ranks (2 × 1) →" in answer.stderr  # --nodes was not repeated
    other = jobs.gptctl(*asked, "-o", "Model.hidden_size=64")
    assert other.returncode == 1
    assert "S011" in other.stderr
    assert "hidden_size is 32 there, 64 here" in other.stderr
    over = jobs.gptctl("resume", stopped, "-o", "Engine.max_steps=20")
    assert over.returncode == 1
    assert "S012" in over.stderr


def test_a_script_with_other_arguments(jobs) -> None:
    """The job's own copy of the script runs, unless the code of now is asked for."""
    script = jobs.folder / "x.py"
    script.write_text("first = 1")
    job = jobs.quick("--gpus-per-node", "1", "--env", "A=1")
    script.write_text("second = 2")
    cases = [
        (("--", "2"), "first = 1", ["2"]),
        (("--", "x.py", "3"), "first = 1", ["3"]),
        (("--code", "now"), "second = 2", []),
        (("--code", "now", "--env", "A=2", "--", "--lr", "0.1"), "second = 2", ["--lr", "0.1"]),
    ]
    for words, code, arguments in cases:
        again = json.loads(jobs.gptctl("rerun", job, "--json", *words).stdout)["job"]
        plan = json.loads((jobs.run_dir(again) / "plan.json").read_text())
        assert (jobs.run_dir(again) / "code" / "x.py").read_text() == code
        assert plan["program"][2:] == arguments
        assert plan["env"]["A"] == ("2" if "A=2" in words else "1")
    refused = jobs.gptctl("resume", job)
    assert refused.returncode == 2
    assert "only the bundled trainer can resume" in refused.stderr


def test_a_fine_tuning_resumes_its_own_state(jobs) -> None:
    """With its optimizer; and a rerun of the resumed job starts with the first weights again."""
    jobs.gptctl("init")
    save_checkpoint(jobs.folder / "weights", 3)
    tuned = ("-o", "Engine.save_load.ckpt_dir=./weights", "-o", "Engine.save_load.load_optimizer=False")
    job = jobs.submit("--cluster", "./quick.yaml", *TRAIN, *tuned, "-o", "Engine.max_steps=400")
    assert jobs.wait(job) == "COMPLETED"
    save_checkpoint(jobs.run_dir(job) / "output", 40)
    resumed = json.loads(jobs.gptctl("resume", job, "--json").stdout)["job"]
    values = values_of(jobs, resumed)
    assert values["Engine.save_load.ckpt_dir"] == (f"{jobs.run_dir(job)}/output", f"resume of {job}")
    assert values["Engine.save_load.load_optimizer"] == (True, f"resume of {job}")
    assert jobs.wait(resumed) == "COMPLETED"
    save_checkpoint(jobs.run_dir(resumed) / "output", 60)
    again = json.loads(jobs.gptctl("rerun", resumed, "--json").stdout)["job"]
    values = values_of(jobs, again)
    assert values["Engine.save_load.ckpt_dir"][0] == str(jobs.folder / "weights")
    assert values["Engine.save_load.load_optimizer"][0] is False


def test_an_older_folder_is_still_rerun(jobs) -> None:
    """Folders of earlier versions have no written.json; damaged ones are refused in one line."""
    job = jobs.quick()
    assert jobs.wait(job) == "COMPLETED"
    written = jobs.run_dir(job) / "written.json"
    text = written.read_text()
    for bad in ("{}", '{"folder": 1, "tree": {}}', text.replace('"map"', '"mop"'), "[" * 10_000, ""):
        written.write_text(bad)
        answer = jobs.gptctl("rerun", job)
        assert answer.returncode == 3, bad
        assert "written.json is damaged" in answer.stderr
    written.unlink()
    answer = json.loads(jobs.gptctl("rerun", job, "--wait", "--json").stdout)
    assert answer["state"] == "COMPLETED"


# In the place of the trainer: three runs in a row, each of which trains again what was not saved. The third one succeeds.
THREE_RUNS = """#!/bin/bash
echo >> {folder}/runs-so-far
printf %s "$TOKEN" | sha256sum > "$GPTCTL_RUN_DIR/token.sha256"
case $(wc -l < {folder}/runs-so-far) in
1) steps="1 2 3" saved=2 ;;
2) steps="3 4 5" saved=4 ;;
*) steps="5 6" ;;
esac
cd "$GPTCTL_RUN_DIR"
mkdir -p output
for step in $steps; do
  echo "{{\\"event\\": \\"train\\", \\"step\\": $step, \\"loss\\": $step.5, \\"attempt\\": 0}}" >> output/metrics.jsonl
done
[ -n "$saved" ] || exit 0
mkdir "output/step_$saved"
echo {{}} > "output/step_$saved/manifest.json"
exit 1
"""


@pytest.fixture
def broken_off(jobs) -> str:
    """The first of three runs; it failed after step 3, with a checkpoint of step 2."""
    jobs.gptctl("init")
    (jobs.folder / "quick").write_text(THREE_RUNS.format(folder=jobs.folder))
    (jobs.folder / "token").write_text("s3cret value\n")
    secrets = ("-o", "Launch.secrets={TOKEN: {file: token}, OTHER: {env: MY_OTHER}}", "-o", "Launch.max_restarts=0")
    job = jobs.submit("--cluster", "./quick.yaml", *TRAIN, "--nodes", "1", *secrets, MY_OTHER="0ther")
    assert jobs.ended(job) == ["FAILED"]
    return job


def resumed(jobs, job: str) -> str:
    elsewhere = jobs.folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    answer = jobs.gptctl("resume", job, "--json", cwd=elsewhere, MY_OTHER="0ther")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)["job"]


def test_a_secret_reaches_the_resumed_job(jobs, broken_off: str) -> None:
    """The file of the secret is found from another folder. Oracle: its hash in the job, and every byte of its files."""
    refused = jobs.gptctl("resume", broken_off)
    assert (refused.returncode, "S007" in refused.stderr) == (1, True)  # MY_OTHER is not set
    job = resumed(jobs, broken_off)
    jobs.ended(job)
    expected = hashlib.sha256(b"s3cret value").hexdigest()
    assert (jobs.run_dir(job) / "token.sha256").read_text().split()[0] == expected
    files = [*jobs.run_dir(job).rglob("*"), *(jobs.folder / "home").rglob("*")]
    assert len(files) > 20
    for file in filter(Path.is_file, files):
        assert b"s3cret" not in file.read_bytes(), file
        assert b"0ther" not in file.read_bytes(), file


@pytest.mark.long
def test_a_run_of_three_jobs(jobs, broken_off: str) -> None:
    """Each step counts once, in the job that kept it. Then the first job is removed, and at last a record is damaged."""
    first, second = broken_off, resumed(jobs, broken_off)
    assert jobs.ended(second) == ["FAILED"]
    third = resumed(jobs, second)
    assert jobs.ended(third) == ["COMPLETED"]
    ids = [first, second, third]
    listed = {row["job"]: row["continues"] for row in json.loads(jobs.gptctl("list", "--json").stdout)}
    assert listed == {first: None, second: first, third: second}

    def metrics() -> list[tuple[str, int]]:
        rows = json.loads(jobs.gptctl("logs", third, "--metrics", "--json").stdout)
        return [(row["job"], row["step"]) for row in rows]

    def shown(job: str) -> list[str]:
        return json.loads(jobs.gptctl("show", job, "--json").stdout)["lineage"]

    assert metrics() == [(first, 1), (first, 2), (second, 3), (second, 4), (third, 5), (third, 6)]
    (curve,) = json.loads(jobs.gptctl("plot", third, "--json").stdout)
    assert (curve["run"], curve["steps"]) == (ids, [1, 2, 3, 4, 5, 6])
    assert [shown(job) for job in ids] == [ids] * 3
    assert " → ".join(ids) in jobs.gptctl("show", third).stdout.replace("\n", " ")
    removal = jobs.gptctl("rm", "--yes", first)
    assert removal.returncode == 0
    assert f"warning: {first} is continued by {second}" in removal.stderr
    assert f"steps 1-2: the folder of {first} was removed" in jobs.gptctl("plot", third, "--json").stderr
    assert [shown(job) for job in ids] == [ids] * 3
    assert metrics() == [(second, 3), (second, 4), (third, 5), (third, 6)]
    for job in (second, third):
        again = jobs.gptctl("resume", job, "--dry-run", "--json", MY_OTHER="0ther")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["continues"] == second
    record = jobs.folder / f"home/.local/state/gptctl/jobs/{first}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "continues": third}))
    assert sorted(shown(second)) == sorted(ids)
    assert metrics() == [(second, 3), (second, 4), (third, 5), (third, 6)]
    assert jobs.gptctl("list").returncode == 0


@pytest.mark.long
def test_a_mingpt_snapshot_is_resumed(jobs) -> None:
    """Killed after the snapshot of epoch 3. Oracle: the lines of the same job, undisturbed."""
    text = "the quick brown fox jumps over the lazy dog. " * 20
    for folder in ("one", "two"):
        (jobs.folder / folder).mkdir()
        (jobs.folder / folder / "gpt.yaml").write_text(MINGPT + "Global: {device: cpu}\n")
        (jobs.folder / folder / "text.txt").write_text(text)
    asked = ("submit", "gpt.yaml", "--gpus-per-node", "1", "-o", "Launch.max_restarts=0")
    whole = json.loads(jobs.gptctl(*asked, "--json", cwd=jobs.folder / "two").stdout)
    await_text(Path(whole["run_dir"]) / "result.json", "COMPLETED")
    job = json.loads(jobs.gptctl(*asked, "--json", cwd=jobs.folder / "one").stdout)
    log = Path(job["log_dir"]) / "attempt-0" / "workerlog.0"
    await_text(log, "Snapshot saved at epoch 3")
    (ranks,) = (Path(job["run_dir"]) / "attempt-0").glob("ranks.*.jsonl")
    os.kill(json.loads(ranks.read_text().splitlines()[0])["pid"], signal.SIGKILL)
    await_text(Path(job["run_dir"]) / "result.json", "FAILED")
    answer = jobs.gptctl("resume", job["job"], "--json")
    assert answer.returncode == 0, answer.stderr
    rest = json.loads(answer.stdout)
    await_text(Path(rest["run_dir"]) / "result.json", "COMPLETED")
    assert jobs.status(rest["job"])["continues"] == job["job"]
    assert re.search(
        rf"continues {job['job']} from the snapshot of epoch \d+ \(step \d+\), with the same", answer.stderr
    )
    lines = (Path(rest["log_dir"]) / "attempt-0" / "workerlog.0").read_text()
    saved = re.search(r"Resuming training from snapshot at Epoch (\d+)", lines)
    assert saved
    assert int(saved[1]) >= 3
    expected = re.findall(ITERATION, (Path(whole["log_dir"]) / "attempt-0" / "workerlog.0").read_text())
    assert re.findall(ITERATION, lines) == [line for line in expected if int(line[1]) > int(saved[1])]


def await_text(file: Path, text: str, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"no {text} in {file}"
        time.sleep(0.02)


@pytest.mark.long
def test_signed_checkpoints_are_resumed_with_their_key_only(jobs) -> None:
    """Two ranks sign, and resume what they signed. With another key, the same checkpoint is refused in words. The key
    is in no file of the jobs."""
    jobs.gptctl("init")
    key, other = "0123456789abcdef" * 4, "fedcba9876543210" * 4
    (jobs.folder / "key").write_text(f"{key}\n")
    signed = ("-o", "Launch.secrets={GPTCTL_CHECKPOINT_KEY: {file: key}}", "-o", "Launch.max_restarts=0")
    first = jobs.submit(*TRAIN, *signed, "-o", "Engine.max_steps=20")
    assert jobs.ended(first, seconds=120) == ["COMPLETED"]
    assert json.loads((jobs.run_dir(first) / "output/step_20/manifest.json").read_text())["signature"]
    for content, state in ((f"{other}\n", "FAILED"), (f"{other}\n{key}\n", "COMPLETED"), ("short\n", "FAILED")):
        (jobs.folder / "key").write_text(content)
        answer = jobs.gptctl("resume", first, "--json", "-o", "Engine.max_steps=25")
        assert answer.returncode == 0, answer.stderr
        job = json.loads(answer.stdout)["job"]
        assert jobs.ended(job, seconds=120) == [state]
        told = jobs.log(job, 0) + jobs.log(job, 1)
        assert ("its signature does not match GPTCTL_CHECKPOINT_KEY" in told) == (content == f"{other}\n")
        assert ("key 1 is too short: 5 of 32 characters" in told) == (content == "short\n")
    for file in [*(jobs.folder / "runs").rglob("*"), *(jobs.folder / "home").rglob("*")]:
        if file.is_file():
            assert not re.search(f"{key}|{other}".encode(), file.read_bytes()), file
