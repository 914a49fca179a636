"""The state of a job: the result that it recorded itself, else what its backend reports."""

from __future__ import annotations

from gptctl.backends import Backends, JobState
from gptctl.engine.run_folder import COMPLETED, FINAL, LOST, UNKNOWN, RunFolder
from gptctl.jobs.store import JobRecord


def state_of(record: JobRecord, backends: Backends) -> JobState:
    """Return the state of a job. Without a recorded result it never counts as completed."""
    # A result is written once, at the very end: it stays true when the backend forgets the job.
    if result := RunFolder(record.local_dir).result():
        return JobState(result.state, result.reason)
    # The record may be from a newer gptctl with other kinds of clusters.
    if not backends.knows(record.kind):
        return JobState(UNKNOWN, f"unknown kind of cluster: {record.kind}")
    return backends.of(record.kind).state(record)


def is_final(state: JobState) -> bool:
    return state.state in FINAL


def may_run(record: JobRecord, backends: Backends) -> bool:
    """Whether processes of the job may still be running."""
    # Those of a lost job may be, and those on hosts that `cancel` could not reach.
    state = state_of(record, backends)
    not_ended = RunFolder(record.local_dir).not_ended_file.exists()
    return not is_final(state) or state.state == LOST or not_ended


def exit_code(state: JobState) -> int:
    return 0 if state.state == COMPLETED else 1
