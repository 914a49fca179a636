"""The state of a job: the result that it recorded itself, else what its backend reports.

The final state is kept in the history, and answers for a job whose folder was removed.
"""

from __future__ import annotations

from gptctl.backends import Backends, JobState, recorded_state
from gptctl.engine.cause import cause_from
from gptctl.engine.run_folder import (
    CANCELLED,
    COMPLETED,
    FINAL,
    LOST,
    PENDING,
    RUNNING,
    UNKNOWN,
    RunFolder,
)
from gptctl.jobs.history import History
from gptctl.jobs.store import JobRecord
from gptctl.text import clock_time


def state_of(record: JobRecord, backends: Backends) -> JobState:
    """Return the state of a job. Without a recorded result it never counts as completed."""
    if kept := kept_state(record):
        return kept
    state = _with_canceller(_current_state(record, backends), record)
    # Whoever sees the end keeps it: the run folder may be deleted next.
    if state.state in (PENDING, RUNNING):
        History().forget(record)
    elif is_final(state) and (state.state != LOST or record.run_folder.is_dir()):
        History().keep(record, state.as_json())
    return state


def kept_state(record: JobRecord) -> JobState | None:
    """Return the final state of a job whose folder was removed, if it is known."""
    history = History()
    removed = history.removed(record)
    if removed is None and record.run_folder.is_dir():
        return None
    found = history.state(record)
    if found is None:
        return None
    # A newer gptctl may have kept more fields than this one knows.
    known = {name: value for name, value in found.items() if name in JobState._fields}
    how = f"run folder removed {clock_time(removed)}" if removed else "run folder removed"
    state = JobState(**{**known, "failure": cause_from(found.get("failure"))})
    return state._replace(reason="; ".join(filter(None, [state.reason, how])))


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


def _current_state(record: JobRecord, backends: Backends) -> JobState:
    # A result is written once, at the very end: it stays true when the backend forgets the job.
    if result := RunFolder(record.local_dir).result():
        return recorded_state(result)
    # The record may be from a newer gptctl with other kinds of clusters.
    if not backends.knows(record.kind):
        return JobState(UNKNOWN, f"unknown kind of cluster: {record.kind}")
    return backends.of(record.kind).state(record)


def needs_backend(record: JobRecord) -> bool:
    """Whether only the backend knows the state of the job."""
    return not RunFolder(record.local_dir).result() and not is_removed(record)


def is_final(state: JobState) -> bool:
    return state.state in FINAL


def may_run(record: JobRecord, backends: Backends) -> bool:
    """Whether processes of the job may still be running."""
    # Those of a lost job may be, and those on hosts that `cancel` could not reach.
    state = state_of(record, backends)
    if is_removed(record):
        return False
    not_ended = RunFolder(record.local_dir).not_ended_file.exists()
    return not is_final(state) or state.state == LOST or not_ended


def exit_code(state: JobState) -> int:
    return 0 if state.state == COMPLETED else 1
