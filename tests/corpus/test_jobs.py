"""The verbs of `gptctl data` as jobs, on this machine. Oracle: the files of the same verb in the foreground."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptctl.cli import cli
from trainer.errors import UserError

TEXTS = ["the first text\n", "ein zweiter\n", "第三个文本\n"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    (tmp_path / "books").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "books" / f"{number}.txt").write_text(text)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gptctl", *words], cwd=folder, capture_output=True, text=True)


def refusal(*words: str) -> tuple[int, str]:
    """The exit code and the messages of gptctl, in this process: its start would take longer."""
    with pytest.raises(UserError) as caught:
        cli(words, standalone_mode=False)
    return caught.value.exit_code, f"error: {caught.value.message}\nhint: {caught.value.hint}"


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_job_writes_the_same_files(folder: Path) -> None:
    words = ["--dedupe", "--documents", "line", "--output-format", "megatron", "--no-eos"]
    here = run(folder, "data", "prepare", "books", "--output", "here/x", *words)
    assert here.returncode == 0, here.stderr
    job = run(folder, "data", "prepare", "books", "--output", "there/x", *words, "--cluster", "local")
    assert job.returncode == 0, job.stdout + job.stderr
    assert content(folder / "there") == content(folder / "here")
    assert "[rank 0] documents        3" in job.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prepare", "books", "--output", "d/x", "--tokenizer", "t", "--no-merge", "--shard-mb", "3"],
         "trainer.tasks.prepare_data --documents=file --field=text --invalid-utf8=replace --invalid-lines=refuse "
         "--output={0}/d/x --tokenizer={0}/t --output-format=npy --shard-mb=3.0 --no-merge -- {0}/books"),
        (["prepare", "/far/*.jsonl", "--format", "jsonl", "--output", "/far/x", "--tokenizer", "t", "--eos", "-", "--overwrite", "--queue"],
         "trainer.tasks.prepare_data --documents=file --field=text --invalid-utf8=replace --invalid-lines=refuse "
         "--output=/far/x --tokenizer={0}/t --eos=- --output-format=npy --shard-mb=128.0 --overwrite "
         "--format=jsonl -- '/far/*.jsonl'"),
        (["train-tokenizer", "books", "--output", "t"],
         "trainer.tasks.train_tokenizer --documents=file --field=text --invalid-utf8=replace --invalid-lines=refuse "
         "--output={0}/t --vocab-size=32000 '--eos=<|endoftext|>' --sample-mb=1000.0 -- {0}/books"),
    ],
    ids=["prepare", "after another job", "train-tokenizer"],
)  # fmt: skip
def test_what_a_job_runs(folder: Path, words: list[str], expected: str) -> None:
    (folder / "t").touch()
    done = run(folder, "data", *words, "--detach", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"-m {expected.format(folder)} &\n" in done.stdout
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "words", [["--time", "5"], ["--dry-run"], ["--nodes", "1"], ["--env", "A=1"], ["-o", "Launch.port=1"], ["--trust"]]
)
def test_options_of_jobs_need_a_job(folder: Path, words: list[str]) -> None:
    done = run(folder, "data", "prepare", "books", "--output", "x", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: only jobs have {words[0]}",
        "hint: add --detach, or --cluster NAME, to run it as a job",
    ]
    assert not (folder / "x_meta.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "Global.seed=1"], "error: -o Global.seed=1: data reads no run config\nhint: only keys of Launch apply"),
        (["-o", "Lanch.nodes=1"], "error: -o Lanch.nodes=1: data reads no run config\nhint: did you mean Launch.nodes?"),
        (["-o", "slurm.time=1"], "error: -o slurm.time=1: data reads no run config\nhint: did you mean Launch.slurm.time?"),
        (["-o", "Launch.nodes=2"], "error: -o Launch.nodes=2: work on data has no layout\nhint: omit it"),
        (["--gpus-per-node", "2"], "error: --gpus-per-node 2: work on data has no layout\nhint: omit it"),
        (["--devices", "1"], "error: --devices 1: work on data has no layout\nhint: omit it"),
        (["nowhere"], "error: no input at nowhere\nhint: "),
        (["--format", "jsonl", "empty"], "error: no input files found\nhint: "),
        (["--tokenizer", "nowhere"], "error: no tokenizer at nowhere: it does not exist\nhint: "),
        (["--eos", "x"], "error: the tokenizer bytes has its own end token\nhint: "),
        (["--output", "there"], "error: there_idx.npz already exists\nhint: use another --output, or --overwrite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_are_found_before_a_job_exists(folder: Path, words: list[str], expected: str) -> None:
    (folder / "empty").mkdir()
    (folder / "there_idx.npz").touch()
    inputs = [] if words[-1] in ("nowhere", "empty") and words[0] != "--tokenizer" else ["books"]
    output = [] if "--output" in words else ["--output", "x"]
    code, errors = refusal("data", "prepare", *inputs, *words, *output, "--detach")
    assert (code, errors.startswith(expected)) == (2, True), errors
    assert not (folder / "home" / "jobs").exists()


def test_mistakes_of_a_training(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there/tokenizer.json").touch()
    code, errors = refusal("data", "train-tokenizer", "books", "--output", "there", "--detach")
    assert (code, errors.splitlines()[0]) == (2, "error: there already has a tokenizer")
    done = run(folder, "data", "train-tokenizer", "books", "--output", "x", "--vocab-size", "3", "--detach")
    assert done.returncode == 2
    assert "'--vocab-size': 3 is not in the range x>=257" in done.stderr
    assert not (folder / "home" / "jobs").exists()


def test_the_programs_work_alone_and_explain_mistakes(folder: Path) -> None:
    def program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"trainer.tasks.{name}", *words]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)

    done = program("prepare_data", "books", "--output", "x", "--json")
    assert json.loads(done.stdout)["documents"] == 3
    again = program("prepare_data", "books", "--output", "x")
    assert again.returncode == 93
    assert "error: x is already prepared" in again.stderr
    wrong = program("train_tokenizer", "books", "--output", "t", "--vocab-size", "many")
    assert wrong.returncode == 2
    assert "error: argument --vocab-size: invalid int value: 'many'" in wrong.stderr


@pytest.mark.long
def test_a_cancelled_job_continues(folder: Path) -> None:
    """Oracle: the output of one that was not cancelled."""
    with open(folder / "big.jsonl", "w") as stream:
        for number in range(400_000):
            stream.write(json.dumps({"text": f"document {number} " * 10}) + "\n")
    words = ["big.jsonl", "--shard-mb", "5"]
    command = ["data", "prepare", *words, "--output", "cut/x", "--cluster", "local"]
    job = json.loads(run(folder, *command, "--detach", "--json").stdout)["job"]
    deadline = time.monotonic() + 60
    while len(list(folder.glob("cut/x.shards/shard-*.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = run(folder, "cancel", job)
    assert done.returncode == 0, done.stderr
    assert not (folder / "cut/x_meta.json").exists()
    again = run(folder, *command)
    assert again.returncode == 0, again.stderr
    (resumed,) = re.findall(r"^\[rank 0\] resumed_shards +([0-9]+)$", again.stdout, re.MULTILINE)
    assert int(resumed) >= 2
    assert run(folder, "data", "prepare", *words, "--output", "whole/x").returncode == 0
    assert content(folder / "cut") == content(folder / "whole")
