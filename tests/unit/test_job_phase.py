"""What a running job does while it trains no step. Oracles: what each test writes as engine, ranks and trainer do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptctl.jobs.job_phase import phase_of
from gptctl.jobs.progress_text import status_pairs
from gptctl.jobs.run_pace import run_pace
from gptctl.jobs.store import JobRecord
from gptctl.jobs.why_text import why_pairs
from gptctl.logs.local_files import LocalLogFiles
from tests.unit.test_progress import NOW, job, line, write


def lines(*each: dict[str, Any]) -> str:
    return "".join(json.dumps(fields) + "\n" for fields in each)


def at(event: str, ago: float, attempt: int = 0, **facts: Any) -> dict[str, Any]:
    return {"event": event, "attempt": attempt, "time": NOW - ago, **facts}


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    (tmp_path / "run").mkdir()
    (tmp_path / "output").mkdir()
    return job(tmp_path / "run")._replace(output_dir=str(tmp_path / "output"))


def shown(record: JobRecord, own: list[dict[str, Any]], trainer: list[dict[str, Any]]) -> str:
    """The line of `gptctl status`."""
    (Path(record.local_dir) / "events.jsonl").write_text(lines(*own))
    (Path(record.output_dir) / "events.jsonl").write_text(lines(*trainer))
    phase = phase_of(record, NOW, None)
    return dict(status_pairs({"progress": None, "duration": None, "phase": phase}, NOW))["phase"]


STARTED, BEGAN = at("started", 60, -1), at("attempt", 59)
GROUP, FIRST = at("process group", 20), at("first step", 10, step=1, resumed=0)


def ranks_start(record: JobRecord, ago: float, attempt: int = 0, ranks: int = 2) -> None:
    folder = Path(record.local_dir) / f"attempt-{attempt}"
    folder.mkdir(exist_ok=True)
    starts = [{"event": "start", "rank": rank, "time": NOW - ago} for rank in range(ranks)]
    (folder / "ranks.0.jsonl").write_text(lines(*starts))


def test_each_part_of_a_start(record: JobRecord) -> None:
    (Path(record.local_dir) / "attempt-0" / "ranks.0.jsonl").unlink()
    assert shown(record, [], []) == ""  # a job of an older version
    assert shown(record, [STARTED], []) == "starting: nodes allocated 1 min ago"
    assert shown(record, [STARTED, BEGAN], []) == "starting: attempt 0 began 59 s ago"
    ranks_start(record, 13, ranks=1)
    assert shown(record, [STARTED, BEGAN], []) == "starting: 1 of 2 ranks up 13 s ago"
    ranks_start(record, 12)
    assert shown(record, [STARTED, BEGAN], []) == "starting: 2 ranks up 12 s ago"
    assert shown(record, [STARTED, BEGAN], [GROUP]) == "starting: process group formed 20 s ago"
    assert (
        shown(record, [STARTED, BEGAN], [GROUP, FIRST]) == "training: the first step began 10 s ago; none is logged yet"
    )


DURING = [
    ([], ""),
    ([at("saving", 4, step=1000)], "saving a checkpoint at step 1,000, for 4 s"),
    ([at("saving", 4, step=10), at("checkpoint", 3, step=10)], ""),
    ([at("evaluating", 2, step=10, split="valid")], "evaluating at step 10, for 2 s"),
    # The checkpoint is committed in the background, after the evaluation has begun.
    ([at("evaluating", 2, step=10), at("checkpoint committed", 1, step=10)], "evaluating at step 10, for 2 s"),
    ([at("evaluating", 2, step=10), at("evaluation", 1, step=10, seconds=1.0)], ""),
    ([at("finished", 1, step=10)], "finishing: the last step was 1 s ago"),
    ([at("stop", 1, step=10)], "stopping: requested 1 s ago"),
    ([at("failed", 1, reason="x")], "failing: a rank failed 1 s ago"),
    ([at("some event of a newer version", 1)], ""),
]


@pytest.mark.parametrize(("events", "expected"), DURING)
def test_during_the_training(record: JobRecord, events: list[dict[str, Any]], expected: str) -> None:
    """A step was logged 5 s ago: what was before that is over."""
    (Path(record.local_dir) / "events.jsonl").write_text(lines(STARTED, BEGAN))
    (Path(record.output_dir) / "events.jsonl").write_text(lines(GROUP, FIRST, *events))
    write(Path(record.output_dir), line(10, time=NOW - 5, job=record.id))
    pace = run_pace(record, LocalLogFiles(Path(record.log_dir), record.run_folder), NOW)
    assert dict(status_pairs(pace, NOW))["phase"] == expected
    facts = {"state": "RUNNING", "reason": "", "waiting": None, "running": pace, "failure": None}
    rows = dict(why_pairs({**facts, "likely_cause": None, "recovered_from": None, "commands": []}, NOW))
    assert rows.get("phase", "") == expected


def test_a_restart(record: JobRecord) -> None:
    """Attempt 2 follows a failure, attempt 3 a requeue. Events of earlier attempts, and of other jobs, do not count."""
    own = [STARTED, BEGAN, at("attempt", 50, 1), at("failure", 40, 1, reason="x")]
    trainer = [GROUP, FIRST, at("process group", 30, 1)]
    assert shown(record, own, trainer) == "attempt 1 failed 40 s ago"
    own.append(at("attempt", 30, 2))
    assert shown(record, own, trainer) == "restarting after a failure (attempt 2): attempt 2 began 30 s ago"
    ranks_start(record, 12, 2)
    others = at("process group", 1, 2, job="another")
    assert shown(record, own, [*trainer, others]) == "restarting after a failure (attempt 2): 2 ranks up 12 s ago"
    own += [at("requeue", 9, 2), at("started", 8, 2), at("attempt", 7, 3)]
    assert shown(record, own, trainer) == "starting: attempt 3 began 7 s ago"
    assert shown(record, [*own, at("end", 1, 3)], trainer) == ""


def test_scripts_and_other_jobs_have_no_phase(record: JobRecord) -> None:
    (Path(record.local_dir) / "events.jsonl").write_text(lines(STARTED, BEGAN))
    assert phase_of(record, NOW, None)
    assert phase_of(record._replace(output_dir=""), NOW, None) is None


ODD: list[Any] = [None, True, "1", -1, 1e308, 10**30, [], {}, [[1]], {"a": 1}]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("name", ["event", "time", "attempt", "job", "step", "ranks"])
def test_any_value_in_an_event(record: JobRecord, name: str, value: object) -> None:
    """Nothing fails, and what is said is valid JSON; a clock that is a year ahead makes no negative age."""
    year = 365 * 86400
    own, trainer = (
        [STARTED, BEGAN, at("failure", 50)],
        [{**GROUP, name: value}, {**at("saving", -year, step=5), name: value}],
    )
    for each in (own, [*own, {**at("attempt", 40, 1), name: value}], [{**STARTED, name: value}]):
        assert len(shown(record, each, trainer)) < 200
        phase = phase_of(record, NOW, None)
        json.dumps(phase, allow_nan=False)
        assert phase is None or phase["seconds"] >= 0
