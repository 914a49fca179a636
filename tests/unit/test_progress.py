"""How far a training is, and the rows of metrics.jsonl. Oracles: sums by hand, and the lines that a training wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptctl.engine.job_result import COMPLETED, FAILED, PENDING, RUNNING
from gptctl.jobs.progress_text import list_cells, status_pairs
from gptctl.jobs.recorded_files import METRICS_TAIL
from gptctl.jobs.store import JobRecord
from gptctl.jobs.training_progress import progress_facts, progress_of, steps_of_arguments
from gptctl.logs.metric_rows import metric_table, parse_metrics, run_rows
from tests.job_records import add_job
from trainer.logline import TrainLine, evaluation_line

NOW = 1_000_000.0


def job(folder: Path, script: bool = False, world: int = 2, **config: Any) -> JobRecord:
    (folder / "config.json").write_text(json.dumps({"resolved": config}))
    (folder / "attempt-0").mkdir()
    start = {"event": "start", "rank": 0, "time": NOW - 3600}
    (folder / "attempt-0/ranks.0.jsonl").write_text(json.dumps(start) + "\n")
    output = "" if script else str(folder)
    return JobRecord("j-1", "j", NOW - 4000, "local", "local", str(folder), str(folder / "logs"), 1, world, world, output_dir=output)  # fmt: skip


def line(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10 - step / 1000, "lr": 1e-4, "tokens_per_second": 1000.0, "step_time": 2.0, **fields}


def write(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def log(folder: Path, rank: int, *lines: object) -> None:
    (folder / "logs/attempt-0").mkdir(parents=True, exist_ok=True)
    (folder / f"logs/attempt-0/workerlog.{rank}").write_text("".join(f"{each}\n" for each in lines))


def left(record: JobRecord, now: float = NOW) -> float | None:
    return progress_facts(record, RUNNING, now)["progress"]["seconds_left"]


def test_a_running_training(tmp_path: Path) -> None:
    """500 of 1,000 steps of 2 s, logged 3 s ago: 997 s are left; at a fifth of them the next line is due."""
    record = job(tmp_path)
    write(tmp_path, line(400, max_steps=1000, time=NOW - 203), line(500, max_steps=1000, time=NOW - 3), {"step": 500, "valid_loss": 3.5, "time": NOW - 3})  # fmt: skip
    facts = progress_facts(record, RUNNING, NOW)
    assert facts["duration"] == 3600
    expected = {"step": 500, "total": 1000, "percent": 50, "loss": 9.5, "valid_loss": 3.5, "tokens_per_second": 1000.0, "seconds_per_step": 2.0, "seconds_left": 997.0, "updated": NOW - 3}  # fmt: skip
    assert facts["progress"] == expected
    assert list_cells(facts) == {"done": "50%", "step": "500/1,000", "loss": "9.5000", "tokens/s": "1,000", "time": "1:00:00", "left": "16:37"}  # fmt: skip
    shown = dict(status_pairs(facts, NOW))
    assert shown["step"] == "500 of 1,000 (50%)"
    assert shown["loss"] == "9.5000, valid 3.5000"
    assert shown["left"].startswith("16:37, about 1970-01-1")


def test_an_overdue_line_stops_the_countdown(tmp_path: Path) -> None:
    """Lines come every 200 s. After an hour without one, the training hangs: 800 s are still left, not 0."""
    record = job(tmp_path)
    write(tmp_path, line(400, max_steps=1000, time=NOW), line(500, max_steps=1000, time=NOW))
    assert left(record, NOW + 150) == 850
    assert left(record, NOW + 3600) == 800


@pytest.mark.parametrize(
    ("cost", "speed", "remaining", "shown"),
    [(172.8, 0.01, 172_800, "2 d 00:00"), (864.0, 0.0, 864_000, "10 d 00:00"), (0.0, 0.0, None, ""), (math.nan, 0.5, 2000, "33:20")],
)  # fmt: skip
def test_the_time_left_of_a_slow_script(
    tmp_path: Path, cost: float, speed: float, remaining: float | None, shown: str
) -> None:
    """FleetX rounds the speed to 0.00 if a step takes minutes; beyond a day, days are counted."""
    record = job(tmp_path, script=True, Launch={"args": ["--max_steps", "1500"]})
    log(tmp_path, 0, "noise", TrainLine(500, 0, 499, 3.0, 0.1, cost, speed, 12, 6, 1e-4))
    facts = progress_facts(record, RUNNING, 0.0)
    assert facts["progress"]["seconds_left"] == (remaining if remaining is None else pytest.approx(remaining))
    assert list_cells(facts)["left"] == shown


def test_an_epoch_mode_run_knows_its_total(tmp_path: Path) -> None:
    """The trainer writes the total; Engine.max_steps is only a limit there."""
    record = job(tmp_path, Engine={"run_mode": "epoch", "max_steps": 500_000})
    write(tmp_path, line(10, max_steps=50, time=NOW))
    assert left(record) == 80
    write(tmp_path, line(10, time=NOW))  # of an older version, which did not
    facts = progress_facts(record, RUNNING, NOW)
    assert facts["progress"]["total"] is None
    assert list_cells(facts)["step"] == "10"


def test_an_older_file_takes_the_total_from_the_config(tmp_path: Path) -> None:
    record = job(tmp_path, Engine={"run_mode": "step", "max_steps": 40})
    write(tmp_path, line(10))
    assert progress_facts(record, RUNNING, NOW)["progress"]["total"] == 40


def test_only_a_running_job_has_time_left_and_the_last_step_counts(tmp_path: Path) -> None:
    record = job(tmp_path)
    write(tmp_path, line(25, max_steps=40, time=NOW))
    (tmp_path / "status.json").write_text('{"state": "finished", "step": 40}')
    (tmp_path / "result.json").write_text(json.dumps({"state": COMPLETED, "ended": NOW - 600}))
    facts = progress_facts(record, COMPLETED, NOW)
    assert facts["duration"] == 3000
    assert (facts["progress"]["step"], facts["progress"]["percent"]) == (40, 100)
    assert facts["progress"]["seconds_left"] is None


def test_a_script_without_steps_has_a_duration_only(tmp_path: Path) -> None:
    record = job(tmp_path, script=True)
    log(tmp_path, 0, "epoch 1 of 3", "loss 3.4")
    assert progress_facts(record, RUNNING, NOW) == {"duration": 3600.0, "progress": None}
    assert list_cells(progress_facts(record, FAILED, NOW))["step"] == ""
    assert progress_facts(record, PENDING, NOW)["duration"] is None


def test_a_script_that_logs_on_its_last_rank(tmp_path: Path) -> None:
    record = job(tmp_path, script=True, world=4)
    log(tmp_path, 0, "hello")
    log(tmp_path, 3, TrainLine(7, 0, 6, 3.0, 0.1, 1.0, 1.0, 12, 6, 1e-4), evaluation_line("valid", 8, 0, 1, 2.5, 1.0))
    progress = progress_facts(record, RUNNING, NOW)["progress"]
    assert (progress["step"], progress["loss"], progress["valid_loss"], progress["total"]) == (8, 3.0, 2.5, None)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    """Oracle: a first half that cannot be read as metrics."""
    record = job(tmp_path)
    write(tmp_path, *(line(step, max_steps=9000, time=NOW) for step in range(1, 4001)))
    text = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff" * (len(text) - METRICS_TAIL) + text[-METRICS_TAIL:])
    assert progress_facts(record, RUNNING, NOW)["progress"]["step"] == 4000


def test_the_speed_is_that_of_the_latest_attempt(tmp_path: Path) -> None:
    record = job(tmp_path)
    write(tmp_path, line(1, step_time=50.0, attempt=0), line(2, step_time=50.0, attempt=0), line(3, step_time=1.0, attempt=1))  # fmt: skip
    assert progress_facts(record, RUNNING, NOW)["progress"]["seconds_per_step"] == 1.0


def test_another_job_in_the_same_output_folder_does_not_count(tmp_path: Path) -> None:
    record = job(tmp_path)
    write(tmp_path, line(5, job="j-1"), line(900, job="j-2"))
    assert progress_facts(record, RUNNING, NOW)["progress"]["step"] == 5


@pytest.mark.parametrize(
    "resolved", [[], {"Launch": 5, "Engine": []}, {"Launch": {"args": 7}, "Engine": {"max_steps": "x"}}]
)
@pytest.mark.parametrize("script", [True, False])
def test_a_damaged_config_has_no_total(tmp_path: Path, resolved: Any, script: bool) -> None:
    record = job(tmp_path, script=script)
    (tmp_path / "config.json").write_text(json.dumps({"resolved": resolved}))
    write(tmp_path, line(10))
    log(tmp_path, 0, TrainLine(10, 0, 0, 3.0, 0.1, 1.0, 1.0, 12, 6, 1e-4))
    assert progress_facts(record, RUNNING, NOW)["progress"]["total"] is None


def test_any_number_can_be_shown(tmp_path: Path) -> None:
    """Oracle: no exception, and no hundreds of digits."""
    record = job(tmp_path)
    write(tmp_path, line(10, max_steps=10**11, step_time=1e250, loss=1e200, tokens_per_second=1e299))
    facts = progress_facts(record, RUNNING, NOW)
    assert all(len(text) < 30 for _, text in status_pairs(facts, NOW))
    assert list_cells(facts)["loss"] == "1e+200"


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--max_steps", "500"], 500),
        (["--max-steps=500", "--lr", "0.1"], 500),
        (["-c", "a.yaml", "-o", "Engine.max_steps=500"], 500),
        (["--train-iters", "10", "--train-iters", "20"], 20),
        (["--max_steps=10", "--max_steps", "20"], 20),
        (["--max_steps"], None),
        (["--max_steps", "many"], None),
        (["--warmup_max_steps", "5"], None),
        (["max_steps", "5"], None),
        ([], None),
    ],
)
def test_the_steps_of_a_script(arguments: list[str], steps: int | None) -> None:
    assert steps_of_arguments(arguments) == steps


def rows(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    return parse_metrics(b"".join(json.dumps(each).encode() + b"\n" for each in lines), "j-1", world=4)


def test_an_evaluation_belongs_to_its_step() -> None:
    found = run_rows(rows(line(20), {"step": 20, "valid_loss": 3.0}, {"step": 30, "valid_loss": 2.0}, line(40)))
    assert [(row["step"], row.get("loss"), row.get("valid_loss")) for row in found] == [
        (20, 9.98, 3.0),
        (30, None, 2.0),
        (40, 9.96, None),
    ]
    assert (found[0]["ips"], found[0]["ips_total"], found[0]["speed"]) == (250.0, 1000.0, 0.5)
    columns, cells = metric_table(found)
    assert columns == ["step", "loss", "valid_loss", "ips", "ips_total", "speed", "lr"]
    assert cells[1] == ["30", "", "2.000000", "", "", "", ""]


def test_what_was_trained_again_replaces_what_was_lost() -> None:
    """Attempt 0 logged 10 to 50 and attempt 1 resumed after 20: 40 and 50 are void, although 1 has only reached 30."""
    lost = [line(step, attempt=0) for step in (10, 20, 30, 40, 50)]
    found = run_rows(rows(*lost, line(30, attempt=1, loss=1.0)))
    assert [(row["step"], row["attempt"]) for row in found] == [(10, 0), (20, 0), (30, 1)]
    older = [{key: value for key, value in each.items() if key != "attempt"} for each in [*lost, line(30)]]
    assert [(row["step"], row["attempt"]) for row in run_rows(rows(*older))] == [(10, 0), (20, 0), (30, 1)]


def test_nothing_in_a_file_can_break_its_reader() -> None:
    odd: list[Any] = [
        {"step": "5"},
        {"step": -1},
        {"step": True},
        {"step": 1e999},
        {"step": 10**400},
        [1],
        {"loss": 1.0},
    ]
    odd += [{"step": 3, "loss": None, "step_time": 0}, {"step": 4, "loss": "x", "attempt": "y", "job": 7}]
    data = b"\n".join(json.dumps(each).encode() for each in odd) + b"\n{\xff\n" + b"[" * 5000
    assert [row["step"] for row in parse_metrics(data)] == [3, 4]
    assert run_rows(parse_metrics(data))[0]["loss"] is None


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 3))))
def test_a_run_has_each_step_once_and_in_order(lines: list[tuple[int, bool, int]]) -> None:
    data = [
        line(step, attempt=attempt) if trained else {"step": step, "valid_loss": 1.0, "attempt": attempt}
        for step, trained, attempt in lines
    ]
    steps = [row["step"] for row in run_rows(rows(*data))]
    assert steps == sorted(set(steps))
    assert not lines or steps[-1] == lines[-1][0]


def test_the_last_evaluation_may_be_long_ago(tmp_path: Path) -> None:
    """2,000 logged steps after it, of a chain whose other job evaluated, too."""
    job = add_job(tmp_path, "gpt-1")
    rows = [{"step": step, "loss": 2.0, "step_time": 0.1, "job": "gpt-1"} for step in range(1, 3001)]
    rows.insert(1000, {"step": 1000, "valid_loss": 2.25, "job": "gpt-1"})
    rows.insert(1500, {"step": 1500, "valid_loss": 9.0, "job": "gpt-2"})
    Path(job.output_dir, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = progress_of(job, is_over=True)
    assert progress
    assert progress.valid_loss == 2.25
