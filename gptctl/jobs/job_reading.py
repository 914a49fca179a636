"""What the files of one job on this machine tell about it: a frozen reading, and its reader.

The reader is called again and again: it reads only what is new, and expensive parts more seldom.
Never asks another machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.backends import JobState
from gptctl.engine.contract import EVENTS
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import size_of
from gptctl.engine.job_result import FINAL
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.costs import EarlierSteps
from gptctl.jobs.history import History
from gptctl.jobs.ledger import ledger_of
from gptctl.jobs.live_rows import LiveRows
from gptctl.jobs.rank_times import RankTimes, newest_rank_times, rank_times
from gptctl.jobs.recorded_files import tail_of
from gptctl.jobs.store import NOTHING, JobRecord
from gptctl.jobs.timeline import Timeline, attempt_starts, timeline_of
from gptctl.jobs.training_progress import configured_steps
from gptctl.logs.lines import Clock, readable
from gptctl.logs.metric_rows import Row
from gptctl.text import clean
from trainer.checkpoint_names import RANK_TIMES

# Of metrics, in a list and in full: bytes that are read, and steps that are kept.
LIST_BYTES, LIST_ROWS = 4 << 20, 2000
JOB_BYTES, JOB_ROWS = 16 << 20, 12_000
LOG_BYTES, PAST_LOG_BYTES = 16 << 10, 4 << 20
LOG_LINES = 60
LONGEST_SHOWN = 400  # characters of a log line: no window is wider
SLOW_EVERY = 10.0  # seconds between two readings of what is expensive
NEWS_EVERY = 1.0  # the same after a new event
SLOW_SHARE = 50  # and so many times as long as the last one took: at most 2 % of a core


class LogLine(NamedTuple):
    text: str
    time: float | None  # of the line, or the last one before it that has a time


class RankLog(NamedTuple):
    """The last lines of one rank."""

    rank: int
    lines: tuple[LogLine, ...]


class JobReading(NamedTuple):
    """A job at a moment. Everything in it was written until then."""

    record: JobRecord
    state: JobState
    ended: float | None
    timeline: Timeline  # its rows are those of all attempts
    run: tuple[Row, ...]  # one per step
    changed: float  # when the file with the rows was written
    total: int | None  # steps, by the config
    reached: int = 0  # the last step of the jobs that it continues
    goodput: float | None = None
    hosts: tuple[str, ...] = ()  # of the latest attempt, by node
    ranks: RankTimes | None = None
    log: RankLog | None = None
    kept: Mapping[str, Any] = NOTHING  # of a folder that was removed, what the history has


class JobReader:
    """Reads one job. `is_detailed`: also its ranks, and more of its metrics."""

    def __init__(self, record: JobRecord, earlier: EarlierSteps, is_detailed: bool = False) -> None:
        self.record, self.is_detailed, self._earlier = record, is_detailed, earlier
        most = (JOB_BYTES, JOB_ROWS) if is_detailed else (LIST_BYTES, LIST_ROWS)
        self._rows = LiveRows(record, *most)
        self._timeline: Timeline | None = None
        self._state: JobState | None = None
        self._signature: object = None
        self._version = -1
        self._began, self._took = 0.0, 0.0  # of the last reading of what is expensive
        self._total: int | None = None
        self._reached: int | None = None
        self._goodput: float | None = None
        self._hosts: tuple[str, ...] = ()
        self._ranks: tuple[object, RankTimes | None] = (None, None)

    def read(self, state: JobState, rank: int | None = None) -> JobReading:
        self._rows.refresh()
        timeline = self._current_timeline(state)
        result = RunFolder(self.record.local_dir).result()
        return JobReading(
            record=self.record,
            state=state,
            ended=(result.ended or None) if result else None,
            timeline=timeline,
            run=tuple(self._rows.run),
            changed=self._changed(),
            total=self._total,
            reached=self._reached or 0,
            goodput=self._goodput,
            hosts=self._hosts,
            ranks=self._newest_ranks() if self.is_detailed else None,
            log=None if rank is None else rank_log(self.record, rank),
            kept=NOTHING if self.record.run_folder.is_dir() else History().facts(self.record),
        )

    def past_ranks(self, moment: float) -> RankTimes | None:
        """The last step of all ranks until a moment. Reads the whole file: not for each frame."""
        found = None
        for each in rank_times(self.record):
            found = each if each.time <= moment else found
        return found

    def _current_timeline(self, state: JobState) -> Timeline:
        """Events, attempts and all rows: read again when the job has a new event."""
        signature = (state, *map(size_of, self._event_files()))
        is_new, passed = signature != self._signature, time.monotonic() - self._began
        least = NEWS_EVERY if is_new else SLOW_EVERY
        is_due = passed >= max(least, SLOW_SHARE * self._took)
        has_news = is_new or self._version != self._rows.version or state.state not in FINAL
        if self._timeline is None or self._state != state or (has_news and is_due):
            self._began, self._state = time.monotonic(), state
            self._signature, self._version = signature, self._rows.version
            self._timeline = timeline_of(self.record, state.state in FINAL, self._rows.rows)
            self._read_slow_parts(self._timeline)
            self._took = time.monotonic() - self._began
        return self._timeline

    def _read_slow_parts(self, timeline: Timeline) -> None:
        folder = RunFolder(self.record.local_dir)
        if self._reached is None:  # once: those jobs have ended
            self._reached = self._earlier.before(self.record, timeline)
        self._goodput = ledger_of(timeline, time.time(), self._reached).goodput
        self._total = configured_steps(self.record)
        self._hosts = tuple(one_line(host, 64) for host in folder.hosts(folder.attempts() - 1))

    def _event_files(self) -> list[Path]:
        folders = (self.record.local_dir, self.record.output_dir)
        return [Path(folder, EVENTS) for folder in folders if folder]

    def _changed(self) -> float:
        row = self._rows.run[-1] if self._rows.run else {}
        # Log lines of scripts have no time of their own.
        return float(row.get("time") or _log_changed(self._rows.source))

    def _newest_ranks(self) -> RankTimes | None:
        # Reading the end of the file is cheap, parsing a thousand numbers less so.
        size = size_of(Path(self.record.output_dir, RANK_TIMES)) if self.record.output_dir else 0
        if size != self._ranks[0]:
            self._ranks = (size, newest_rank_times(self.record))
        return self._ranks[1]


def attempt_at(timeline: Timeline, moment: float) -> int:
    """The latest attempt that had begun by then; 0 if none had."""
    begun = [number for number, began in attempt_starts(timeline).items() if began <= moment]
    return max(begun, default=0)


def rank_log(
    record: JobRecord, rank: int, attempt: int | None = None, until: float | None = None
) -> RankLog:
    """The last lines of a rank, in its latest attempt; those until a moment if one is given."""
    if attempt is None:
        attempt = RunFolder(record.local_dir).attempts() - 1
    file = Path(record.log_dir, f"attempt-{attempt}", f"workerlog.{rank}")
    # Far back in a long log nothing is found: the whole file may have gigabytes.
    data, changed = tail_of(file, LOG_BYTES if until is None else PAST_LOG_BYTES)
    clock, found = Clock(changed), list[LogLine]()
    clock.start(data)
    for line in data.split(b"\n"):
        moment = clock.stamp(line, 0)
        clock.now = clock.now if moment is None else moment
        when = None if clock.now == float("-inf") else clock.now
        if line.strip() and (until is None or (when is not None and when <= until)):
            text = clean(readable(line)).expandtabs(4).replace("\n", " ")
            found.append(LogLine(text[:LONGEST_SHOWN], when))
        del found[:-LOG_LINES]
    return RankLog(rank, tuple(found))


def _log_changed(log: Path | None) -> float:
    try:
        return os.stat(log).st_mtime if log else 0.0
    except OSError:
        return 0.0
