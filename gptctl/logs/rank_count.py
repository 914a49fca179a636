"""How many ranks of a job are up. Shown until the first step."""

from __future__ import annotations

import time
from typing import NamedTuple

from gptctl.engine.job_result import RUNNING
from gptctl.engine.rank_runs import RankRun, rank_runs
from gptctl.logs.files import LogFiles
from gptctl.reporting import Say

RECOUNT_EVERY = 5.0  # seconds between two counts when all ranks are up


class RankCount(NamedTuple):
    attempt: int = 0
    started: int = 0
    up: int = 0


def count_ranks(files: LogFiles) -> RankCount:
    """Count the ranks of the latest attempt. A rank is up between its start and end events."""
    attempt = max(files.attempts(), default=0)
    # Runs are sorted by start, so the last process of each rank wins.
    latest = {run.rank: run for run in rank_runs(files.records(attempt))}
    up = sum(not run.is_over for run in latest.values())
    return RankCount(attempt, len(latest), up)


def first_start(files: LogFiles) -> float | None:
    """Return when the first rank of the job started; None if no rank has."""
    # Of the first attempt: the duration of a job includes its restarts.
    runs: list[RankRun] = rank_runs(files.records(min(files.attempts(), default=0)))
    return min((run.started for run in runs if run.started is not None), default=None)


def count_text(count: RankCount, world: int, logs_steps: bool) -> str:
    """`2 of 4 ranks are up`. `logs_steps`: this is the bundled trainer, whose steps come next."""
    attempt = f"attempt {count.attempt}: " if count.attempt else ""
    if not count.started:
        return f"{attempt}starting …"
    waiting = "; waiting for the first step" if logs_steps and count.up >= world else ""
    ranks = "rank is" if world == 1 else "ranks are"
    return f"{attempt}{count.up} of {world} {ranks} up{waiting}"


class RankWatch:
    """Counts ranks: on every call while they start, every few seconds when all are up."""

    def __init__(self, files: LogFiles, world: int) -> None:
        self._files, self._world = files, world
        self._last, self._due = RankCount(), 0.0

    def count(self) -> RankCount:
        # A count reads a file per node, so it is reused. A new attempt makes it wrong at once.
        is_old = max(self._files.attempts(), default=0) > self._last.attempt
        if is_old or time.monotonic() >= self._due:
            self._last = count_ranks(self._files)
            pause = RECOUNT_EVERY if self._last.up >= self._world else 0.0
            self._due = time.monotonic() + pause
        return self._last


class RankLines:
    """Prints a line whenever more ranks are up. For output that cannot be updated in place."""

    def __init__(self, files: LogFiles, world: int, logs_steps: bool, say: Say) -> None:
        self._watch, self._world, self._logs_steps = RankWatch(files, world), world, logs_steps
        self._say, self._last_reported = say, (-1, -1)

    def update(self, state: str) -> None:
        # Before and after that there is nothing to count.
        if state != RUNNING:
            return
        count = self._watch.count()
        is_new = (count.attempt, count.up) > self._last_reported
        # If all ranks are up on the first call, the job may be long past its first step.
        is_late = self._last_reported < (0, 0) and count.up >= self._world
        if is_new and not is_late:
            self._say(count_text(count, self._world, self._logs_steps))
        self._last_reported = max(self._last_reported, (count.attempt, count.up))
