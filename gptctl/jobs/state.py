"""The state of a job: the result that it recorded itself, else what its backend reports.

The final state is kept in the history, and answers for a job whose folder was removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gptctl.backends import Backends, JobState, recorded_state
from gptctl.engine.cause import HOST_LOST, cause_from
from gptctl.engine.contract import RESULT
from gptctl.engine.error_text import one_line
from gptctl.engine.job_result import (
    CANCELLED,
    COMPLETED,
    FINAL,
    LONGEST_REASON,
    LOST,
    PENDING,
    RUNNING,
    UNKNOWN,
)
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.history import History
from gptctl.jobs.store import JobRecord
from gptctl.text import clock_time
from trainer.errors import OUT_OF_REACH, UserError


def state_of(record: JobRecord, backends: Backends) -> JobState:
    """Return the state of a job. Without a recorded result it never counts as completed."""
    if kept := kept_state(record):
        return kept
    try:
        state = _with_canceller(_current_state(record, backends), record)
    # A folder without permission, or on a disk that fails: it must not hide the other jobs.
    except OSError as error:
        why = f"cannot read {error.filename}: {error.strerror}"
        found = History().state(record)
        return _as_kept(found, why) if found else JobState(UNKNOWN, why)
    # Whoever sees the end keeps it: the run folder may be deleted next.
    if state.state in (PENDING, RUNNING):
        History().forget(record)
    elif is_final(state) and (state.state != LOST or record.run_folder.is_dir()):
        History().keep(record, state.as_json())
    return _with_not_ended(state, record)


def kept_state(record: JobRecord) -> JobState | None:
    """Return the final state of a job whose folder was removed, if it is known."""
    history = History()
    removed = history.removed(record)
    if removed is None and record.run_folder.is_dir():
        return None
    found = history.state(record)
    if found is None:
        return None
    how = f"run folder removed {clock_time(removed)}" if removed else "run folder removed"
    return _as_kept(found, how)


def _as_kept(found: Mapping[str, Any], how: str) -> JobState:
    """The state of the history, with how it is known."""
    reason = found.get("reason")
    text = one_line(reason, LONGEST_REASON) if isinstance(reason, str) else ""
    reasons = "; ".join(filter(None, [text, how]))
    return JobState(found["state"], reasons, cause_from(found.get("failure")))


def is_removed(record: JobRecord) -> bool:
    """Whether only the history tells how the job ended."""
    return kept_state(record) is not None


def _with_canceller(state: JobState, record: JobRecord) -> JobState:
    """Say who cancelled a job: the state alone says that it was cancelled."""
    # Jobs of older versions have the reason `cancelled`.
    if state.state != CANCELLED or state.reason not in ("", "cancelled"):
        return state
    who = RunFolder(record.local_dir).cancelled_by()
    return JobState(CANCELLED, f"by {who[0]}, {clock_time(who[1])}" if who else "")


def _with_not_ended(state: JobState, record: JobRecord) -> JobState:
    """Say where processes of an ended job may be left: its state alone looks final."""
    hosts = RunFolder(record.local_dir).not_ended() if is_final(state) else []
    if not hosts:
        return state
    where = f"may still be running on {', '.join(hosts)}: gptctl cancel {record.id}"
    return state._replace(reason="; ".join(filter(None, [state.reason, where])))


def refuse_if_not_ended(record: JobRecord) -> None:
    """Raise UserError if processes of an ended job may be left on some hosts."""
    if hosts := RunFolder(record.local_dir).not_ended():
        hint = f"stop it there first: gptctl cancel {record.id}"
        message = f"{record.id} may still be running on {', '.join(hosts)}"
        raise UserError(message, hint, OUT_OF_REACH)


def _current_state(record: JobRecord, backends: Backends) -> JobState:
    # A result is written once, at the very end: it stays true when the backend forgets the job.
    folder = RunFolder(record.local_dir)
    if result := folder.result():
        # A cancel that could not reach the first host stopped the others, which it takes for lost.
        is_cancelled = HOST_LOST in result.reason and folder.is_cancelled()
        return JobState(CANCELLED) if is_cancelled else recorded_state(result)
    # The record may be from a newer gptctl with other kinds of clusters.
    if not backends.knows(record.kind):
        return JobState(UNKNOWN, f"unknown kind of cluster: {record.kind}")
    return _without_result(record, backends.of(record.kind).state(record))


def _without_result(record: JobRecord, state: JobState) -> JobState:
    """Correct a final state that a backend derived without the result of the job."""
    # Exit codes tell less than the result: a job that was stopped in time may exit with 0.
    if not is_final(state) or RunFolder(record.local_dir).result():
        return state
    found = History().state(record)
    if found and found["state"] not in (LOST, state.state):
        return _as_kept(found, f"{RESULT} is missing or damaged; this is what was seen before")
    if not found and os.path.lexists(record.run_folder / RESULT):
        return JobState(LOST, f"how it ended is unknown: {RESULT} is damaged")
    return state


def needs_backend(record: JobRecord) -> bool:
    """Whether only the backend knows the state of the job, or whether anything of it is left."""
    folder = RunFolder(record.local_dir)
    return (not folder.result() or bool(folder.not_ended())) and not is_removed(record)


def is_final(state: JobState) -> bool:
    return state.state in FINAL


def may_run(record: JobRecord, backends: Backends) -> bool:
    """Whether processes of the job may still be running, and `cancel` has something to do."""
    if backends.knows(record.kind):
        backends.of(record.kind).before_cancel(record)
    # Those of a lost job may be, and those on hosts that did not say that nothing is left there.
    state = state_of(record, backends)
    if is_removed(record):
        return False
    # A newer gptctl may have created the job.
    is_over = not backends.knows(record.kind) or backends.of(record.kind).is_over(record)
    return not is_final(state) or state.state == LOST or not is_over


def exit_code(state: JobState) -> int:
    return 0 if state.state == COMPLETED else 1
