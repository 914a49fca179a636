"""Results of evaluations in the rows of a run. Oracle: the files that each test writes, and rows by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gptctl.cli.logs import print_metrics
from gptctl.jobs import evaluations
from gptctl.jobs.evaluations import evaluations_in
from gptctl.jobs.run_metrics import file_rows, whole_run
from gptctl.jobs.store import JobRecord
from tests.unit.test_jobs import record

PPL = {"task": "perplexity", "path": "/texts/wiki.txt", "loss": 1.0, "ppl": 2.7, "adjusted_ppl": 3.1}


def trains(folder: Path, job: str, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "loss": 9.0, "step_time": 1.0, "job": job, "attempt": 0}) + "\n")


def evaluates(folder: Path, step: int, time: float = 1.0, **facts: Any) -> None:
    number = len(list(folder.glob("evaluation.*")))
    (folder / f"evaluation.{number:016x}.json").write_text(json.dumps({**PPL, "step": step, "time": time, **facts}))


def job_of(folder: Path, name: str) -> JobRecord:
    return record(name, output_dir=str(folder), local_dir=str(folder.parent / name))


def shown(rows: list[dict[str, Any]], name: str = "eval_ppl:wiki.txt") -> list[tuple[int, Any]]:
    return [(row["step"], row.get(name)) for row in rows]


def test_steps_that_were_logged_and_steps_that_were_not(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    trains(folder, "a", 10, 20, 30)
    for step in (5, 20, 25):
        evaluates(folder, step, ppl=float(step))
    rows = whole_run([job_of(folder, "a")])
    assert shown(rows) == [(5, 5.0), (10, None), (20, 20.0), (25, 25.0), (30, None)]
    assert [row.get("loss") for row in rows] == [None, 9.0, 9.0, None, 9.0]
    assert {row["job"] for row in rows} == {"a"}
    assert shown(file_rows(folder / "metrics.jsonl")) == shown(rows)


def test_the_last_checkpoint_may_be_later_than_the_last_line(tmp_path: Path) -> None:
    """But a step that only a later job has reached does not belong to this one."""
    folder = tmp_path / "out"
    trains(folder, "a", 10)
    (folder / "status.json").write_text(json.dumps({"step": 15, "job": "a"}))
    evaluates(folder, 15)
    evaluates(folder, 40)
    assert shown(whole_run([job_of(folder, "a")])) == [(10, None), (15, 2.7)]
    trains(folder, "b", 20, 30, 40)
    both = [job_of(folder, "b"), job_of(folder, "a")]
    assert shown(whole_run(both)) == [(10, None), (15, 2.7), (20, None), (30, None), (40, 2.7)]


def test_a_step_that_another_job_trained_again_elsewhere(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trains(first, "a", 10, 20)
    trains(second, "b", 20)
    evaluates(first, 10)
    evaluates(first, 20, ppl=5.0)
    jobs = [job_of(second, "b"), job_of(first, "a")]
    assert shown(whole_run(jobs)) == [(10, 2.7), (20, None)]
    evaluates(second, 20, ppl=6.0)
    assert shown(whole_run(jobs)) == [(10, 2.7), (20, 6.0)]


def test_texts_have_names_of_their_own_and_the_latest_result_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trains(tmp_path, "a", 10)
    evaluates(tmp_path, 10, time=3.0, ppl=7.0)
    evaluates(tmp_path, 10, time=2.0, ppl=8.0)
    cloze = {"task": "cloze", "accuracy": 0.25, "path": "a \x1b[2J\n b.jsonl"}
    evaluates(tmp_path, 10, **cloze)
    rows = whole_run([job_of(tmp_path, "a")])
    assert shown(rows) == [(10, 7.0)]
    assert shown(rows, "cloze_accuracy:a b.jsonl") == [(10, 0.25)]
    print_metrics(rows)
    head, cells = capsys.readouterr().out.splitlines()[-2:]
    assert head.split()[-3:] == ["cloze_accuracy:a", "b.jsonl", "eval_ppl:wiki.txt"]
    assert cells.split()[-2:] == ["0.25", "7"]


def test_other_windows_and_other_texts_of_a_name_are_other_curves(tmp_path: Path) -> None:
    """The name of the first result stays, whatever comes later."""
    trains(tmp_path, "a", 10)
    evaluates(tmp_path, 10, time=1.0, ppl=7.0, window=1024, stride=32)
    evaluates(tmp_path, 10, time=2.0, ppl=8.0, window=64, stride=1)
    evaluates(tmp_path, 10, time=3.0, ppl=9.0, window=1024, stride=32, path="/other/wiki.txt")
    evaluates(tmp_path, 10, time=4.0, ppl=6.0, window=1024, stride=32)
    rows = whole_run([job_of(tmp_path, "a")])
    assert shown(rows) == [(10, 6.0)]
    assert shown(rows, "eval_ppl:/texts/wiki.txt (window 64, stride 1)") == [(10, 8.0)]
    assert shown(rows, "eval_ppl:/other/wiki.txt (window 1024, stride 32)") == [(10, 9.0)]


@pytest.mark.parametrize(
    "facts",
    [
        {"step": -1},
        {"step": 10**300},
        {"step": "10"},
        {"step": None},
        {"task": "other"},
        {"task": ["perplexity"]},
        {"path": 3},
    ],
)
def test_what_is_not_a_result(tmp_path: Path, facts: dict[str, Any]) -> None:
    evaluates(tmp_path, **{"step": 10, **facts})
    assert evaluations_in(tmp_path) == []


def test_odd_files_are_passed_over(tmp_path: Path) -> None:
    evaluates(tmp_path, 10, ppl="low", time=None)
    (tmp_path / f"evaluation.{'a' * 16}.json").write_text("[" * 100_000)
    (tmp_path / f"evaluation.{'b' * 16}.json").mkdir()
    (tmp_path / "evaluation.x.json").write_text(json.dumps({**PPL, "step": 1}))
    os.mkfifo(tmp_path / f"evaluation.{'c' * 16}.json")
    (found,) = evaluations_in(tmp_path)
    assert (found.step, found.time) == (10, 0.0)
    assert found.numbers == {"eval_loss:wiki.txt": 1.0, "eval_adjusted_ppl:wiki.txt": 3.1}
    assert evaluations_in(tmp_path / "nowhere") == []


def test_the_newest_of_too_many_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the file: the names are random, and here the newest ones come last."""
    monkeypatch.setattr(evaluations, "MOST", 3)
    for step in range(1, 6):
        evaluates(tmp_path, step, time=float(step))
        os.utime(tmp_path / f"evaluation.{step - 1:016x}.json", (step, step))
    assert [each.step for each in evaluations_in(tmp_path)] == [3, 4, 5]
