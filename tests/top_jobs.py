"""Made-up jobs as `gptctl top` sees them, for tests of its views and keys."""

from __future__ import annotations

import math
import re
from typing import Any

from gptctl.cli.styled_lines import plain_text
from gptctl.cli.table_layout import text_width
from gptctl.cli.top_keys import ViewState
from gptctl.cli.top_view import top_lines
from gptctl.jobs.job_reading import LogLine, RankLog
from gptctl.jobs.rank_times import RankTimes
from gptctl.jobs.top_snapshot import JobDetail, JobSummary, MetricCurve, ShownEvent, TopSnapshot, slow_ranks

NOW = 1_790_000_000.0
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def summary(job: str = "gpt-3f9a2c", state: str = "RUNNING", **facts: Any) -> JobSummary:
    values: dict[str, Any] = {
        "reason": "", "cluster": "a800", "nodes": 2, "world": 16, "created": NOW - 100, "duration": 90.0, "step": 560,
        "total": 1000, "percent": 56, "left": 40.0, "loss": 2.7881, "valid_loss": None, "tokens_per_second": 17440.0,
        "goodput": 0.61, "losses": (4.0, 3.5, 3.0, 2.8),
    }  # fmt: skip
    return JobSummary(job=job, state=state, **{**values, **facts})


def pending(job: str = "gpt-77b0d1", reason: str = "Priority, expected to start 2026-11-18 21:20:00") -> JobSummary:
    unknown = dict.fromkeys(("duration", "step", "total", "percent", "left", "loss", "tokens_per_second", "goodput"))
    return summary(job, "PENDING", reason=reason, losses=(), **unknown)


def detail(job: JobSummary, own_ms: list[float] | None = None, steps: int = 500, **facts: Any) -> JobDetail:
    numbers = tuple(range(1, steps + 1))
    times = RankTimes(0, steps, NOW, own_ms) if own_ms else None
    values: dict[str, Any] = {
        "loss": MetricCurve(numbers, tuple(5 / math.sqrt(step) for step in numbers)),
        "tokens_per_second": MetricCurve(numbers, tuple(17000.0 + step for step in numbers)),
        "ranks": times,
        "median_ms": times.median if times else None,
        "slowest": slow_ranks(times, 8, ["gpu7", "gpu8"]) if times else (),
        "events": tuple(ShownEvent(NOW - 90 + n, f"event {n}", n == 3) for n in range(40)),
        "log": RankLog(0, tuple(LogLine(f"line {n}", NOW) for n in range(60))),
        "memory": 1.2e9,
        "gpu_memory": None,
    }
    return JobDetail(summary=job, time=NOW, **{**values, **facts})


def snapshot(*jobs: JobSummary, detail: JobDetail | None = None, **facts: Any) -> TopSnapshot:
    return TopSnapshot(NOW, facts.pop("is_past", False), jobs, detail, **facts)


def screen(shown: TopSnapshot | None, view: ViewState, width: int = 80, height: int = 24) -> list[str]:
    """The text of a picture; fails where it does not fit exactly, or could control a terminal."""
    lines = [plain_text(line) for line in top_lines(shown, view, width, height)]
    assert len(lines) == height
    for line in lines:
        assert text_width(line) == width, line
        assert not CONTROL.search(line), line
    return [line.rstrip() for line in lines]
