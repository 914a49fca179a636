"""Whether a running job seems stuck. Oracle: the times that each test writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gptctl.jobs.run_pace import run_pace
from gptctl.jobs.why_text import why_pairs
from gptctl.logs.local_files import LocalLogFiles
from tests.unit.test_progress import NOW, job, line, log, write


def pace(folder: Path, record, now: float = NOW):
    return run_pace(record, LocalLogFiles(folder / "logs", folder), now)


@pytest.mark.parametrize(
    ("silence", "is_stuck"),
    [(3, False), (199, False), (1999, False), (2001, True), (-50, False)],
)
def test_a_training_seems_stuck_after_ten_usual_intervals(tmp_path: Path, silence: float, is_stuck: bool) -> None:
    """A line every 100 steps of 2 s; a clock that was set back does not mean a hang."""
    record = job(tmp_path)
    write(tmp_path, line(400, max_steps=1000, time=NOW - 200 - silence), line(500, max_steps=1000, time=NOW - silence))
    found = pace(tmp_path, record)
    assert found["seems_stuck"] is is_stuck
    assert (found["idle"], found["usual_interval"], found["duration"]) == (max(0, silence), 200.0, 3600)


def test_the_first_line_alone_does_not_tell_the_interval(tmp_path: Path) -> None:
    """The config does: 50 steps of 2 s."""
    record = job(tmp_path, Engine={"logging_freq": 50})
    write(tmp_path, line(50, max_steps=1000, time=NOW - 900))
    assert pace(tmp_path, record)["seems_stuck"] is False
    write(tmp_path, line(50, max_steps=1000, time=NOW - 1001))
    assert pace(tmp_path, record)["seems_stuck"] is True


def test_fast_steps_get_two_minutes(tmp_path: Path) -> None:
    record = job(tmp_path)
    rows = [line(step, step_time=0.01, time=NOW - 119) for step in (1, 2)]
    write(tmp_path, *rows)
    assert pace(tmp_path, record)["seems_stuck"] is False
    assert pace(tmp_path, record, NOW + 2)["seems_stuck"] is True


@pytest.mark.parametrize(("silence", "is_stuck"), [(60, False), (1000, True)])
def test_a_script_without_steps_is_judged_by_its_logs(tmp_path: Path, silence: int, is_stuck: bool) -> None:
    record = job(tmp_path, script=True)
    log(tmp_path, 0, "importing")
    os.utime(tmp_path / "logs/attempt-0/workerlog.0", (NOW - silence, NOW - silence))
    found = pace(tmp_path, record)
    assert (found["progress"], found["seems_stuck"], found["idle"]) == (None, is_stuck, silence)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"resolved": 5}', '{"resolved": {"Engine": {"logging_freq": 1e9}}}', "\x00"]
)
def test_a_damaged_config_is_no_reason(tmp_path: Path, text: str) -> None:
    record = job(tmp_path)
    (tmp_path / "config.json").write_text(text)
    write(tmp_path, line(1, time=NOW), line(2, time=NOW))
    assert pace(tmp_path, record)["usual_interval"] == 2.0
    json.dumps(pace(tmp_path, record), allow_nan=False)


def test_the_text_of_a_job_that_seems_stuck(tmp_path: Path) -> None:
    record = job(tmp_path)
    write(tmp_path, line(400, max_steps=1000, time=NOW - 3200), line(500, max_steps=1000, time=NOW - 3000))
    facts = {
        "job": "j-1", "state": "RUNNING", "reason": "", "explained": True, "waiting": None, "failure": None,
        "likely_cause": None, "recovered_from": {"attempt": 0, "reason": "rank 1 (node 0): ValueError: x"},
        "running": pace(tmp_path, record), "commands": ["gptctl stacks j-1"],
    }  # fmt: skip
    shown = dict(why_pairs(facts, NOW))
    assert shown["step"] == "500 of 1,000 (50%)"
    assert shown["stuck?"] == "no step for 50 min; it usually logs one every 200.0 s. An evaluation may take longer"
    assert shown["recovered"] == "from attempt 0: rank 1 (node 0): ValueError: x"
    assert shown["try"] == "gptctl stacks j-1"
