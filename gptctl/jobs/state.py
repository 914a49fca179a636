"""The state of a job: what it recorded itself, else what its backend says."""

from __future__ import annotations

from gptctl.backends import Backends, JobState
from gptctl.engine.run_folder import COMPLETED, FINAL, LOST, UNKNOWN, RunFolder
from gptctl.jobs.store import JobRecord


def state_of(record: JobRecord, backends: Backends) -> JobState:
    """The job's own result counts first; a missing one never counts as success."""
    if result := RunFolder(record.local_dir).result():
        return JobState(result.state, result.reason)
    if not backends.knows(record.kind):
        return JobState(UNKNOWN, f"unknown kind of cluster: {record.kind}")
    return backends.of(record.kind).state(record)


def is_final(state: JobState) -> bool:
    return state.state in FINAL


def may_run(record: JobRecord, backends: Backends) -> bool:
    """Whether processes of the job may be left: also of a lost one, and where `cancel` did not reach."""
    state = state_of(record, backends)
    not_ended = RunFolder(record.local_dir).not_ended.exists()
    return not is_final(state) or state.state == LOST or not_ended


def exit_code(state: JobState) -> int:
    return 0 if state.state == COMPLETED else 1
