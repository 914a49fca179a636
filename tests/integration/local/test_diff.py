"""`gptctl diff`: jobs that gptctl froze and the bundled trainer trained. Oracle: what the test changed between them.

The jobs run a shell script instead of Python, so that they end at once; then the trainer trains each of them from its
own folder, in a fork of a process that has torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from gptctl import cli
from tests.integration.local.conftest import Jobs
from tests.ranks import start
from tests.terminal import GPTCTL, Run

TINY = """
Global: {device: cpu, global_batch_size: 8, micro_batch_size: 4}
Engine: {max_steps: 12, logging_freq: 1, eval_freq: 4, eval_iters: 2, test_iters: 1}
Model: {num_layers: 1, hidden_size: 32, num_attention_heads: 2, hidden_dropout_prob: 0, attention_probs_dropout_prob: 0}
Optimizer: {lr: {max_lr: 1.0e-3, decay_steps: 12}}
Data: {Train: {dataset: {name: CharDataset, path: corpus.txt, max_seq_len: 16}}}
Generation: {num_return_sequences: 0}
Launch: {cluster: ./quick.yaml, gpus_per_node: 1, job_name: gpt}
"""
TEXT, OTHER_TEXT = ("to be or not to be, that is the " + word for word in ("question: " * 60, "answer!! : " * 60))
ONE = ("--gpus-per-node", "1")


class Desk(Jobs):
    """A folder with jobs; `diff` runs in this process, since it is called so often."""

    def said(self, *words: str) -> tuple[int, str, str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with (
                mock.patch.object(sys, "argv", ["gptctl", "diff", *words]),
                mock.patch.dict(os.environ, {"HOME": str(self.folder / "home")}),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = cli._run()
        finally:
            os.chdir(before)
        out.flush(), err.flush()
        return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]

    def diff(self, *words: str) -> dict[str, Any]:
        code, out, said = self.said("--json", *words)
        assert code in (0, 1), out + said
        found = json.loads(out)
        assert found["equal"] == (code == 0)
        return found  # type: ignore[no-any-return]

    def rerun(self, job: str, *changes: str, verb: str = "rerun") -> str:
        answer = self.gptctl(verb, job, "--json", *changes)
        assert answer.returncode == 0, answer.stderr
        return str(json.loads(answer.stdout)["job"])

    def train(self, *names: str) -> None:
        """All at once, each as its plan says."""
        self.ended(*names)
        running = []
        for name in names:
            run, attempt = self.run_dir(name), self.run_dir(name) / "attempt-0"
            words = json.loads((run / "plan.json").read_text())["program"][3:]
            environ = {"GPTCTL_JOB": name, "GPTCTL_ATTEMPT": "0", "GPTCTL_ATTEMPT_DIR": str(attempt)}
            running.append(start(self.folder / "forks" / name, *words, **environ))
        for each in running:
            ended = each.wait()
            assert ended.ok, ended.text

    def losses(self, job: str) -> dict[int, float]:
        lines = (self.run_dir(job) / "output" / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("diff")

    def gptctl(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(folder / "home"), **environ}
        return subprocess.run([GPTCTL, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)

    made = Desk(folder, gptctl)
    (folder / "config.yaml").write_text(TINY)
    (folder / "corpus.txt").write_text(TEXT)
    return made


@pytest.fixture(scope="module")
def first(desk: Desk) -> str:
    job = desk.submit("config")
    desk.train(job)
    return job


def changed(found: dict[str, Any]) -> dict[str, list[str]]:
    """The keys that differ, by section."""
    return {
        name: [each["key"] for each in section["values"]]
        for name, section in found["sections"].items()
        if not section["equal"]
    }


def test_a_rerun_is_the_same_job(desk: Desk, first: str) -> None:
    again = desk.rerun(first)
    desk.train(again)
    found = desk.diff(again)  # alone: compared with the job that it is a rerun of
    assert [found[side]["job"] for side in "ab"] == [first, again]
    assert (changed(found), found["metrics"]["equal"]) == ({}, True)
    assert found["metrics"]["loss"]["common_steps"] == 12
    assert found["metrics"]["tokens_per_second"]["ratio"] > 0
    code, told, _ = desk.said(first, again)
    assert (code, told.splitlines()[-1]) == (0, f"{first} and {again}: no differences")
    everything = desk.diff(first, again, "--all")["sections"]
    assert {each["key"]: each["a"] for each in everything["config"]["values"]}["Engine.max_steps"] == 12
    assert all(section["recorded"] and section["values"] for section in everything.values())


def test_jobs_that_differ_in_a_key_and_in_the_seed(desk: Desk, first: str) -> None:
    """The first loss is that of the same weights, and the update after it is another one; with another seed, all are."""
    faster = desk.rerun(first, "-o", "Optimizer.lr.max_lr=2e-3", "--env", "HF_TOKEN=hf_1")
    seeded = desk.rerun(first, "-o", "Global.seed=7")
    desk.train(faster, seeded)
    found = desk.diff(faster)
    assert changed(found) == {"config": ["Optimizer.lr.max_lr"], "environment": ["HF_TOKEN"]}
    (rate,) = found["sections"]["config"]["values"]
    assert (rate["a"], rate["b"], rate["training"]) == (0.001, 0.002, True)
    assert (rate["a_from"], rate["b_from"]) == ("config.yaml:5", "-o Optimizer.lr.max_lr=2e-3")
    one, other, loss = desk.losses(first), desk.losses(faster), found["metrics"]["loss"]
    assert loss["first_difference"] == min(step for step in one if abs(one[step] - other[step]) > 1e-6) > 1
    assert loss["steps"][0] == {"step": 1, "a": one[1], "b": other[1], "difference": 0}
    assert loss["steps"][-1]["difference"] == abs(one[12] - other[12])
    assert {each["name"] for each in found["metrics"]["final"] if not each["equal"]} == {"valid_loss", "test_loss"}
    _, told, _ = desk.said(first, faster)
    assert "hf_1" not in told
    assert "0.001 (config.yaml:5)" in told
    assert f"of 12 common steps, first at {loss['first_difference']}, by" in told
    found = desk.diff(first, seeded)
    assert changed(found) == {"config": ["Global.seed"]}
    assert found["metrics"]["loss"]["first_difference"] == 1


def test_data_and_packages_that_changed(desk: Desk, first: str) -> None:
    """The text was edited between two equal jobs, and a package was updated. Then the second is made a job of an older
    gptctl, which recorded neither; and its folder is removed."""
    (desk.folder / "corpus.txt").write_text(OTHER_TEXT)
    second = desk.rerun(first)
    desk.train(second)
    (desk.folder / "corpus.txt").write_text(TEXT)
    file = desk.run_dir(second) / "attempt-0" / "environment.json"
    recorded = json.loads(file.read_text())
    recorded["packages"]["numpy"] = "1.26.0\x1b[31m"
    file.write_text(json.dumps(recorded))
    found = changed(desk.diff(second))
    assert sorted(found) == ["data", "packages"]
    assert found["packages"] == ["numpy"]
    assert {"fingerprint", "train digest"} <= set(found["data"])
    assert "\x1b" not in desk.said(second)[1]
    file.unlink()
    found = desk.diff(first, second)
    assert list(changed(found)) == ["environment", "packages", "nodes", "data"]
    assert found["sections"]["packages"]["not_recorded"] == {"a": [], "b": ["environment.json"]}
    assert f"packages: not recorded for {second} (no environment.json)" in desk.said(first, second)[1]
    shutil.rmtree(desk.run_dir(second))
    code, told, said = desk.said(first, second)
    assert code == 1
    assert f"config: not recorded for {second} (no config.json)" in told
    assert f"the folder of {second} is missing" in said
    code, told, _ = desk.said(second, second)
    assert code == 0
    assert "not recorded for either: config, code, environment, packages, data" in told


def test_scripts_that_differ_in_code(desk: Desk) -> None:
    """A line was changed, a module removed, and arguments given. The rerun of a script is the same job."""
    script = desk.folder / "x.py"
    script.write_text("import beside\nfirst = 1\n# \x1b[2J\n")
    (desk.folder / "beside.py").write_text("empty = 1\n")
    first = desk.quick(*ONE)
    again = desk.rerun(first)
    script.write_text("import beside\nfirst = 2\n# \x1b[2J\n")
    (desk.folder / "beside.py").unlink()
    second = desk.submit("--cluster", "./quick.yaml", "--gpus-per-node", "2", "--", "x.py", "--lr", "long words " * 30)
    desk.ended(first, again, second)
    assert desk.diff(again)["equal"]
    found = desk.diff(first, second, "--code")
    assert changed(found)["code"] == ["beside.py", "x.py"]
    assert "Launch.args" in changed(found)["config"]
    assert changed(found)["layout"] == ["Distributed.dp_degree", "world", "Launch.gpus_per_node"]
    shown = [line for line in found["code_diff"] if line[:1] in "+-"]
    expected = (
        f"--- {first}/beside.py|+++ /dev/null|-empty = 1|--- {first}/x.py|+++ {second}/x.py|-first = 1|+first = 2"
    )
    assert shown == expected.split("|")
    told = desk.said(first, second, "--code")[1]
    assert "\n-first = 1\n+first = 2\n" in told
    assert "\x1b" not in told
    assert "not recorded for either: packages, data" in told
    # On terminals: nothing is wrapped by the terminal itself, and the sides are coloured.
    for columns in (40, 80):
        run = Run(GPTCTL, "diff", first, second, cwd=desk.folder, columns=columns)
        assert run.finish() == 1
        assert max(map(len, run.screen())) <= columns
        assert "layout: 3 differences" in run.screen()
        assert "\x1b[31m1" in run.text
        assert "\x1b[32m2" in run.text


def test_wrong_usage(desk: Desk, first: str) -> None:
    for words, said in (
        ((first,), f"gptctl diff {first} "),
        ((first, "nothing-123456"), "unknown job"),
        ((first, "./missing.jsonl"), "does not exist"),
        (("./x.py",), "give two"),
        ((first, first, "--tolerance", "-1"), "--tolerance"),
        ((), "gptctl diff --help"),
    ):
        code, out, err = desk.said(*words)
        assert (code, out) == (2, "")
        assert said in err


def test_a_run_without_gptctl(desk: Desk, first: str) -> None:
    """What torchrun started can be compared by the file that it wrote. Oracle: a job of the same config."""
    folder = desk.folder / "own"
    folder.mkdir()
    (folder / "corpus.txt").write_text(TEXT)
    ended = start(folder, "-c", "../config.yaml", "Engine.max_steps=6").wait()
    assert ended.ok, ended.text
    found = desk.diff("own/output/metrics.jsonl", first)
    loss = found["metrics"]["loss"]
    assert (loss["common_steps"], loss["first_difference"]) == (6, None)
    assert found["metrics"]["last_step"] == {"a": 6, "b": 12}
    assert [found["sections"][name]["equal"] for name in ("packages", "data", "config")] == [True, True, False]


def test_a_job_that_continues_another_is_one_run_with_it(desk: Desk, first: str) -> None:
    """Oracle: the job that was trained without a break: it has the same steps and losses."""
    part = desk.rerun(first, "-o", "Engine.max_steps=6")
    desk.train(part)
    resumed = desk.rerun(part, "-o", "Engine.max_steps=12", verb="resume")
    desk.train(resumed)
    found = desk.diff(first, resumed)
    assert found["b"]["run"] == [part, resumed]
    assert changed(found) == {"config": ["Engine.save_load.ckpt_dir"]}
    assert found["metrics"]["loss"]["common_steps"] == 12
    assert found["metrics"]["equal"]
    # Alone, it is compared with the job that it continues.
    assert desk.diff(resumed)["a"]["job"] == part


@pytest.mark.long
def test_real_jobs(jobs: Jobs) -> None:
    """The same through torchrun, two ranks: a rerun, and a job with another batch and an edited copy of the trainer."""
    real = Desk(jobs.folder, jobs.gptctl)
    (real.folder / "config.yaml").write_text(
        TINY.replace("cluster: ./quick.yaml, gpus_per_node: 1", "gpus_per_node: 2")
    )
    (real.folder / "corpus.txt").write_text(TEXT)
    first = real.submit("config")
    assert real.wait(first, 200) == "COMPLETED"
    again, other = real.rerun(first), real.rerun(first, "-o", "Global.micro_batch_size=2")
    assert [real.wait(job, 200) for job in (again, other)] == ["COMPLETED"] * 2
    assert changed(real.diff(again)) == {}
    file = real.run_dir(other) / "code" / "trainer" / "logline.py"
    file.write_text(file.read_text() + "# mine\n")
    found = real.diff(other, "--code", "--tolerance", "1e-4")
    assert changed(found)["code"] == ["trainer/logline.py"]
    assert "+# mine" in found["code_diff"]
    assert "Global.micro_batch_size" in changed(found)["config"]
    assert found["metrics"]["equal"]
