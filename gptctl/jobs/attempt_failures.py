"""How an attempt of a job failed, and why: the first failure, its likely cause, the fix.

Reads the records and the ends of the logs that are on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gptctl.backends import JobState
from gptctl.engine.cause import Cause
from gptctl.engine.first_failure import tail
from gptctl.engine.job_result import CANCELLED, COMPLETED, FAILED, FINAL
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.failures import Evidence, LikelyCause, LogText, likely_cause, own_hint
from gptctl.jobs.store import JobRecord
from gptctl.logs.failed import Failure
from gptctl.logs.files import LogFiles
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.tables import failure_line, failure_of, failure_report

READ_ATTEMPTS = 20  # whose logs are read, the newest first


class AttemptFailure(NamedTuple):
    attempt: int
    failure: Failure
    cause: Cause | None
    likely: LikelyCause | None
    own_hint: str  # the fix that the program itself printed
    has_checkpoints: bool

    @property
    def is_explained(self) -> bool:
        return bool(self.likely or self.own_hint)

    @property
    def fix(self) -> str:
        if self.own_hint or not self.likely:
            return self.own_hint
        return self.likely.signature.fix_for(self.has_checkpoints)


def latest_failure(record: JobRecord, state: JobState, files: LogFiles) -> AttemptFailure:
    """Explain the end of a job that did not complete."""
    is_complete = RunFolder(record.local_dir).is_complete(state.state)
    attempt, failure = failure_of(files, None, is_complete, state.failure)
    cause = failure.cause or state.failure
    return _explained(record, state.state, attempt, failure, cause, state.reason)


def _explained(
    record: JobRecord,
    state: str,
    attempt: int,
    failure: Failure,
    cause: Cause | None,
    reason: str = "",
) -> AttemptFailure:
    logs = _logs_of(record, attempt, failure)
    said = cause.text if cause else reason
    how = (cause.exit, cause.signal) if cause else (None, None)
    likely = likely_cause(Evidence(state, said, logs, *how))
    own = own_hint(said, "\n".join(log.text for log in logs[:1]))
    return AttemptFailure(attempt, failure, cause, likely, own, bool(record.output_dir))


def _logs_of(record: JobRecord, attempt: int, failure: Failure) -> tuple[LogText, ...]:
    """The ends of the logs that may explain a failure, the nearest to it first."""
    logs = Path(record.log_dir) / f"attempt-{attempt}"
    found = []
    first = failure.first
    if first:
        text = tail(logs / f"workerlog.{first.rank}", first.log_start)
        found.append(LogText(f"rank {first.rank}", text))
    node = failure.first_node if first is None else first.node
    if node is not None:
        found.append(LogText(f"node {node}", tail(logs / f"node.{node}.log")))
    # Of Slurm: before the first attempt it is one folder higher.
    batch = logs if RunFolder(record.local_dir).attempts() else logs.parent
    found.append(LogText("batch log", tail(batch / "batch.log")))
    return tuple(log for log in found if log.text)


class FailureText(NamedTuple):
    """A failure as people read it."""

    job: str
    attempt: int
    what: str  # in one line
    title: str  # of its likely cause; empty if none was found
    why: str
    fix: str
    last: dict[str, list[str]]  # the last lines of the logs that show it, by file


def failure_texts(record: JobRecord, state: JobState) -> Iterator[FailureText]:
    """Every attempt of a job that failed, oldest first; of very many the newest."""
    files = LocalLogFiles(Path(record.log_dir), record.run_folder)
    numbers = sorted(files.attempts())[-READ_ATTEMPTS:]
    for number in numbers:
        _, failure = failure_of(files, number)
        is_end = number == numbers[-1] and state.state in FINAL
        if is_end and state.state in (COMPLETED, CANCELLED):
            continue
        if is_end:
            found = latest_failure(record, state, files)
        elif failure.is_failure:
            found = _explained(record, FAILED, number, failure, failure.cause)
        else:
            continue
        yield _failure_text(record, state if is_end else None, found, files)


def _failure_text(
    record: JobRecord, end: JobState | None, found: AttemptFailure, files: LogFiles
) -> FailureText:
    report = failure_report(files, found.attempt, end.state if end else FAILED)
    what = failure_line(found.attempt, found.failure) if found.failure.is_failure else ""
    if end and not what:
        what = ": ".join(filter(None, [end.state, end.reason]))
    signature = found.likely.signature if found.likely else None
    return FailureText(
        record.id,
        found.attempt,
        what,
        signature.title if signature else "",
        signature.cause if signature else "",
        found.fix,
        report.last,
    )
