"""Translate what Slurm reports about a job into a state of gptctl."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from gptctl.backends import JobState, cause_in_folder, recorded_state
from gptctl.backends.slurm.queue import ACTIVE_STATES, PENDING_STATES, AccountingRecord, QueuedJob
from gptctl.engine.contract import NO_ENGINE_PYTHON
from gptctl.engine.first_failure import tail
from gptctl.engine.job_result import (
    CANCELLED,
    COMPLETED,
    FAILED,
    NODE_FAIL,
    OUT_OF_MEMORY,
    PENDING,
    PREEMPTED,
    RUNNING,
    TIMEOUT,
    UNKNOWN,
)
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord

# Slurm writes why it stopped a job to the job's own log, such as
# `slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-01T10:00:00 DUE TO PREEMPTION ***`.
STOP_REASON = re.compile(
    r"^(?:srun|slurmstepd\S*): error: (Node failure on .*|\*\*\* JOB .* DUE TO .*? \*\*\*)",
    re.MULTILINE,
)

STATES = {
    "COMPLETED": COMPLETED,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
    "FAILED": FAILED,
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "TIMEOUT": TIMEOUT,
    "DEADLINE": TIMEOUT,
    "PREEMPTED": PREEMPTED,
    "NODE_FAIL": NODE_FAIL,
    "BOOT_FAIL": NODE_FAIL,
    **dict.fromkeys(PENDING_STATES, PENDING),
    **dict.fromkeys(ACTIVE_STATES, RUNNING),
}
# Reasons for which a job waits until somebody changes the job or the cluster.
NEVER_STARTS = re.compile(
    "BadConstraints|Partition(Node|Time)Limit|(Account|QOS)NotAllowed|Invalid(Account|QOS)|"
    "DependencyNeverSatisfied"
)
SCRIPT_FAILED = 53  # the signal that Slurm reports if it could not start a batch script


def state_in_queue(seen: QueuedJob, folder: RunFolder, record: JobRecord) -> JobState:
    """Return the state of a job that is in the queue."""
    kind = STATES.get(seen.state, UNKNOWN)
    if kind == PENDING:
        facts = [_requeued(seen, folder, record), _why_pending(seen)]
        return JobState(PENDING, "; ".join(filter(None, facts)))
    if kind == RUNNING:
        begun = folder.has_ranks(folder.attempts() - 1)
        again = f"attempt {folder.attempts() - 1}" if folder.attempts() > 1 else ""
        stage = "" if begun else "starting"
        if seen.state != "RUNNING":
            stage = seen.state.lower()
        facts = [again, stage, _requeued(seen, folder, record)]
        return JobState(RUNNING, ", ".join(filter(None, facts)))
    if kind == UNKNOWN:
        return JobState(UNKNOWN, f"Slurm reports {seen.state}")
    # The job knows best how it ended: Slurm sees only the exit code of the batch script.
    if result := folder.result():
        return recorded_state(result)
    if kind == CANCELLED and "Dependency" in seen.reason and not folder.is_cancelled():
        return _with_result_saved(
            JobState(CANCELLED, "a job that it waited for did not end as required"), folder
        )
    return state_after_end(seen.as_accounting_record, folder, record)


def _why_pending(seen: QueuedJob) -> str:
    is_known = seen.start not in ("", "N/A", "Unknown")
    expected = f", expected to start {seen.start.replace('T', ' ')}" if is_known else ""
    reason = "" if seen.reason in ("", "None") else seen.reason
    if NEVER_STARTS.search(reason):
        return f"{reason}: it will never start; cancel it, and request what the cluster has"
    return f"{reason}{expected}" if reason else expected.removeprefix(", ")


def _requeued(seen: QueuedJob, folder: RunFolder, record: JobRecord) -> str:
    if not seen.restarts:
        return ""
    times = "once" if seen.restarts == 1 else f"{seen.restarts} times"
    return f"requeued {times}{_stop_reason(record, folder)}"


def _stop_reason(record: JobRecord, folder: RunFolder) -> str:
    """Return why Slurm stopped an attempt, from the newest log that contains a reason."""
    newest = folder.attempts() - 1
    for attempt in range(newest, -1, -1):
        log = tail(Path(record.log_dir) / f"attempt-{attempt}" / "batch.log")
        if reasons := dict.fromkeys(match[1] for match in STOP_REASON.finditer(log)):
            which = "" if attempt == newest else f"attempt {attempt}: "
            return f" ({which}{'; '.join(reasons)})"
    return ""


def state_after_end(end: AccountingRecord, folder: RunFolder, record: JobRecord) -> JobState:
    """Return the state of a job that ended without recording a result."""
    kind = STATES.get(end.state, UNKNOWN)
    if kind == COMPLETED:
        return JobState(COMPLETED, "reported by Slurm; the job could not record its own result")
    if kind == CANCELLED:
        return after_scancel(folder)
    if end.signal == SCRIPT_FAILED and not folder.attempts():
        where = f"on {end.nodes or 'a node'}: check that the nodes see {record.dir_on_nodes}"
        hint = f"gptctl doctor --cluster {record.cluster}"
        reason = f"Slurm could not start the job script {where}: {hint}"
        return _with_result_saved(JobState(kind, reason), folder)
    # The batch script explained this in its only line of output.
    if end.code == NO_ENGINE_PYTHON:
        said = tail(Path(record.log_dir) / "batch.log").strip().rpartition("\n")[2]
        return _with_result_saved(JobState(kind, said.removeprefix("error: ")), folder)
    # Slurm reports 0 and an empty text for what it does not know.
    facts = {"exit code": end.code, "signal": end.signal, "on": end.nodes}
    known = [f"{name} {value}" for name, value in facts.items() if value]
    reason = f"{', '.join([f'Slurm reports {end.state}', *known])}{_stop_reason(record, folder)}"
    # The engine was stopped before it could record the failure that its ranks recorded.
    cause = cause_in_folder(record, folder) if kind in (FAILED, OUT_OF_MEMORY) else None
    reason = f"{cause.reason()}; {reason}" if cause else reason
    if kind == OUT_OF_MEMORY:
        reason = f"killed by the out-of-memory killer; {reason}"
    return _with_result_saved(JobState(kind, reason, cause), folder)


def after_scancel(folder: RunFolder) -> JobState:
    """Return the state of a job that was cancelled, by gptctl or by somebody else."""
    reason = "" if folder.is_cancelled() else "with scancel"
    return _with_result_saved(JobState(CANCELLED, reason), folder)


def _with_result_saved(state: JobState, folder: RunFolder) -> JobState:
    """Record the result of a job, because Slurm forgets it after some minutes."""
    # Other states are not final: Slurm may still requeue the job.
    if state.state in (CANCELLED, FAILED, TIMEOUT, OUT_OF_MEMORY) and folder.path.is_dir():
        # The disk may be full, or the folder another user's: then Slurm is asked again.
        with suppress(OSError):
            folder.finish(*state)
    return state
