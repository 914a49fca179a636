"""The costs of jobs whose clocks jump. The files are real; their times are made up, as only a clock that is set makes them.

Oracle: the accounts of every attempt add up to the time of its allocation, and none is negative.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptctl.jobs.costs import EarlierSteps, attempt_rows, cost_row, ledger_of_job
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.timeline import timeline_of
from tests.job_records import add_job

YEAR, HOUR = 365 * 86400.0, 3600.0
NOW = 1.79e9
EVENTS = "started attempt failure requeue signal end".split()
TRAINER = [
    "process group",
    "first step",
    "saving",
    "checkpoint",
    "checkpoint committed",
    "evaluation",
    "finished",
    "failed",
]
# What happens, the seconds until then, a jump of the wall clock of the host, whether it was restarted, and on which host.
moments = st.tuples(
    st.sampled_from([*EVENTS, *TRAINER, "row", "row", "row", "repeated", "ranks"]),
    st.floats(0, 5000),
    st.sampled_from([0.0] * 6 + [HOUR, -HOUR, YEAR, -YEAR, -1.0]),
    st.sampled_from([False] * 9 + [True]),
    st.integers(0, 1),
    st.booleans(),
)


class Writer:
    """Writes what engine, ranks and trainer write, by the clocks of two hosts."""

    def __init__(self, record: JobRecord) -> None:
        self.record, self.walls, self.steady = record, [NOW - 5e5, NOW - 5e5], [5e4, 1e3]
        self.attempt, self.step = 0, 0

    def write(self, what: str, seconds: float, jump: float, is_restart: bool, host: int, has_clock: bool) -> None:
        for each in (0, 1):
            self.walls[each] += seconds
            self.steady[each] += seconds
        self.walls[host] = max(0.0, self.walls[host] + jump)
        self.steady[host] = 1.0 if is_restart else self.steady[host]
        fields: dict[str, Any] = {"time": self.walls[host], "host": f"host{host}"}
        fields |= {"clock": self.steady[host]} if has_clock else {}
        run, output = Path(self.record.local_dir), Path(self.record.output_dir)
        if what in EVENTS:
            self.attempt += what == "attempt"
            self.append(
                run / "events.jsonl", event=what, attempt=self.attempt, nodes=1, per_node=2, reason="x", **fields
            )
        elif what in TRAINER:
            more = {"stall": seconds, "seconds": seconds, "step": self.step, "resumed": self.step // 2}
            self.append(output / "events.jsonl", event=what, attempt=self.attempt, job=self.record.id, **more, **fields)
        elif what == "ranks":
            folder = run / f"attempt-{self.attempt}"
            folder.mkdir(exist_ok=True)
            (folder / "last-step").write_text(f"{self.step} {self.walls[host]} {self.steady[host]}\n")
            for event in ("start", "end"):
                self.append(folder / f"ranks.{host}.jsonl", event=event, rank=host, exit=1, **fields)
        else:
            self.step += 10
            times = {"step_time": seconds / 10, "reader_time": 0.1, "wait_time": seconds / 20}
            name = "metrics.jsonl" if what == "row" else "metrics.repeated.jsonl"
            self.append(output / name, step=self.step, attempt=self.attempt, loss=1.0, **times, **fields)

    def append(self, file: Path, **fields: Any) -> None:
        with file.open("a") as stream:
            stream.write(json.dumps(fields) + "\n")


STARTS_AT_ONCE = [("started", 0.0, 0.0, False, 0, False)] * 2
A_YEAR_BACK = [
    ("started", 1.0, 0.0, False, 0, True),
    ("row", 9.0, -YEAR, True, 0, True),
    ("attempt", 5.0, YEAR, False, 1, False),
]


@settings(max_examples=200, deadline=None)
@example(STARTS_AT_ONCE, True)
@example(A_YEAR_BACK, False)
@given(st.lists(moments, max_size=25), st.booleans())
def test_accounts_add_up_whatever_clocks_do(happened: Sequence[Any], is_over: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = add_job(Path(folder), "a-000001", "FAILED" if is_over else "RUNNING")
        writer = Writer(record)
        for moment in happened:
            writer.write(*moment)
        store = Store(Path(folder) / "home")
        ledger = ledger_of_job(record, "FAILED" if is_over else "RUNNING", EarlierSteps(store), NOW)
        timeline = timeline_of(record, is_over)
        if is_over:
            # The allocations of an ended job do not depend on when somebody asks.
            assert [each.ended is None for each in timeline.allocations].count(True) == 0
        expected = sum(
            each.gpus * max(0.0, (NOW if each.ended is None else each.ended) - each.began)
            for each in timeline.allocations
        )
        assert ledger.allocation == pytest.approx(expected, rel=1e-9, abs=1e-3)
        for each in ledger.attempts:
            assert each.ended >= each.began
            assert sum(each.seconds.values()) == pytest.approx(each.ended - each.began, rel=1e-9, abs=1e-3)
            assert all(seconds >= 0 for segment in each.segments for seconds in segment.seconds.values())
            assert all(segment.ended >= segment.began for segment in each.segments)
        assert ledger.queued >= 0
        json.dumps([cost_row(ledger), attempt_rows(ledger)], allow_nan=False)
