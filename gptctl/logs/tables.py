"""Reports about a job's logs: which rank failed first, and the list of files.

Makes rows and text; `gptctl.cli.logs` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from gptctl.engine.cause import Cause, name_of
from gptctl.engine.error_text import signal_name
from gptctl.engine.job_result import FAILED
from gptctl.engine.rank_runs import RankRun, node_exits, rank_runs
from gptctl.logs.failed import Failure, failure_in
from gptctl.logs.files import FileFilter, LogFile, LogFiles
from gptctl.logs.lines import readable
from gptctl.logs.stream import LineFilter, LogReader, merged
from gptctl.text import count

LAST_LINES = 30  # enough for most tracebacks
MOST_SHOWN = 4  # files whose last lines are shown if no rank or node is known to have failed
# For people; the keys of a row are those of the JSON output.
LIST_COLUMNS = ("attempt", "file", "rank", "node", "host", "size", "last write", "ended")


def last_lines(files: LogFiles, file: LogFile) -> list[str]:
    source = LogReader(files, file, LineFilter(tail=LAST_LINES), from_start=False)
    return [readable(line.text) for line in merged([source], close=True)]


def failure_of(
    files: LogFiles,
    attempt: int | None = None,
    is_over: bool = False,
    known: Cause | None = None,
) -> tuple[int, Failure]:
    """Find the failure of an attempt, by default the latest.

    `is_over`: see `find_failure`; `known`: the first failure of the job, as far as its state tells.
    """
    latest = max(files.attempts(), default=0)
    attempt = latest if attempt is None else attempt
    return attempt, failure_in(
        files.records(attempt), is_over, known if attempt == latest else None
    )


class FailureReport(NamedTuple):
    """What `gptctl logs --failed` shows."""

    attempt: int
    failure: Failure
    last: dict[str, list[str]]  # the last lines of the failed rank or node, by file name
    recovered: int | None = None  # the latest attempt that failed, if the job recovered from it

    def lines(self, job: str = "JOB") -> Iterator[str]:
        yield from _failure_text(self.attempt, self.failure, bool(self.last))
        if self.recovered is not None:
            again = f"gptctl logs {job} --failed --attempt {self.recovered}"
            yield f"attempt {self.recovered} failed: {again}"
        for name, lines in self.last.items():
            yield from ("", f"the last lines of {name}:", *(f"  {line}" for line in lines))
        if self.failure.cascade:
            # These failed because the first one did; their logs are rarely useful.
            yield from ("", "then:")
            yield from (f"  {_cascade_text(self.failure, run)}" for run in self.failure.cascade)

    def as_json(self) -> dict[str, Any]:
        lines = [line for several in self.last.values() for line in several]
        return {"attempt": self.attempt, **self.failure.as_json(), "last_lines": lines}


def failure_report(
    files: LogFiles,
    attempt: int | None = None,
    state: str = "",
    is_over: bool = False,
    known: Cause | None = None,
) -> FailureReport:
    """Report the failure of an attempt, by default the latest.

    `state` is that of the job; for the others see `failure_of`.
    """
    is_latest = attempt is None
    attempt, failure = failure_of(files, attempt, is_over, known)
    # Empty files have nothing to show: do not print their headings.
    listed = [file for file in files.scan(attempt) if file.attempt == attempt and file.size]
    failed_files = [file for file in listed if (file.kind, file.number) == failure.first_file]
    # The job failed before a node recorded how: the reason is in the log of a node or the batch
    # script.
    if not failure.is_failure and state == FAILED:
        failed_files = [file for file in listed if file.kind in ("node", "batch")][:MOST_SHOWN]
    last = {file.name: last_lines(files, file) for file in failed_files}
    is_well = is_latest and not failure.is_failure
    return FailureReport(attempt, failure, last, failed_before(files, attempt) if is_well else None)


def failed_before(files: LogFiles, attempt: int) -> int | None:
    """Return the latest attempt before this one that failed."""
    earlier = sorted((number for number in files.attempts() if number < attempt), reverse=True)
    return next((number for number in earlier if failure_of(files, number)[1].is_failure), None)


def failure_line(attempt: int, failure: Failure) -> str:
    """`attempt 0: rank 2 failed first: SIGKILL`"""
    return next(_failure_text(attempt, failure, is_of_job=True))


def _failure_text(attempt: int, failure: Failure, is_of_job: bool) -> Iterator[str]:
    first = failure.first
    if first:
        yield f"attempt {attempt}: rank {first.rank} failed first: {first.how}"
        yield f"  host {first.host}, node {_or_unknown(first.node)}, pid {_or_unknown(first.pid)}"
        yield f"  ended {_moment(first.ended)}{_lasted(first)}"
        if first.max_rss_mb is not None:
            yield f"  max RSS {first.max_rss_mb:.0f} MB"
    elif failure.cause:
        cause = failure.cause
        yield f"attempt {attempt}: {name_of(cause.node, ())} failed first: {cause.text}"
    elif failure.ranks_started:
        yield f"attempt {attempt}: {_without_failure_text(failure)}"
    elif failure.is_failure or is_of_job:
        yield f"attempt {attempt}: no rank ever started"
    else:
        yield f"attempt {attempt}: nothing has failed"
    # If a rank failed, the exit of its launch script is only a consequence.
    if not first:
        for node, code in sorted(failure.node_exits.items()):
            yield f"  the launch script of node {node}: {_exit_text(code)}"
    if first and failure.silent:
        are_killed = failure.silent[0].was_killed
        how = "killed" if are_killed else "still running, or killed with their node"
        yield f"  no exit recorded for {_silent_ranks(failure)}: {how}"


def _without_failure_text(failure: Failure) -> str:
    started = f"{failure.ranks_started} started"
    if not failure.silent or not failure.silent[0].was_killed:
        return f"no rank has failed ({started})"
    killed = f"{_silent_ranks(failure)} killed, no exit recorded"
    return f"no rank recorded a failure ({started}); {killed}"


def _silent_ranks(failure: Failure) -> str:
    """`2 ranks (0, 1)`"""
    # The first eight are enough to find their node.
    ranks = ", ".join(str(run.rank) for run in failure.silent[:8])
    ranks += ", …" if len(failure.silent) > 8 else ""
    return f"{count(len(failure.silent), 'rank')} ({ranks})"


def _cascade_text(failure: Failure, run: RankRun) -> str:
    delay = failure.delay(run)
    after = "at an unknown time" if delay is None else f"{delay:+.1f} s"
    return f"rank {run.rank} on {run.host} (node {_or_unknown(run.node)}): {run.how}, {after}"


def _exit_text(code: int) -> str:
    # A shell reports a program killed by signal N as 128 + N.
    return f"exit {code}" + (f" ({signal_name(code - 128)})" if 128 < code < 160 else "")


def _or_unknown(value: object) -> object:
    return "?" if value is None else value


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    # A damaged record can have a time that no calendar has.
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _lasted(run: RankRun) -> str:
    if run.started is None or run.ended is None:
        return ""
    return f", after {run.ended - run.started:.1f} s"


def list_rows(
    files: LogFiles, wanted: FileFilter, job_is_over: bool = False
) -> list[dict[str, Any]]:
    """Make the rows of `gptctl logs --list`, one per file."""
    listed = wanted.now(files)
    # Read the records once per attempt, not per file.
    records = {attempt: files.records(attempt) for attempt in {file.attempt for file in listed}}
    runs = {
        attempt: {run.rank: run for run in rank_runs(each)} for attempt, each in records.items()
    }
    codes = {attempt: node_exits(each) for attempt, each in records.items()}
    rows = []
    for file in listed:
        run = runs[file.attempt].get(file.number) if file.kind == "rank" else None
        code = codes[file.attempt].get(file.number) if file.kind == "node" else None
        how = run.how if run else _exit_text(code) if code is not None else "running"
        rows.append(
            {
                "attempt": file.attempt,
                "file": file.name,
                "rank": file.number if file.kind == "rank" else None,
                "node": file.number if file.kind == "node" else run.node if run else None,
                "host": run.host if run else None,
                "size": file.size,
                "changed": file.changed,
                # Nothing runs after the job has ended, even if no exit was recorded.
                "ended": "no exit recorded" if job_is_over and how == "running" else how,
            }
        )
    return rows


def list_cells(rows: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Format the rows for people, in the order of `LIST_COLUMNS`."""
    shown = [
        {**row, "changed": _moment(row["changed"]), "size": f"{row['size']:,}"} for row in rows
    ]
    return [["" if cell is None else cell for cell in row.values()] for row in shown]
