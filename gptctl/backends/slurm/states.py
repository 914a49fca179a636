"""What Slurm says about a job, as a state of gptctl's."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from gptctl.backends import JobState
from gptctl.backends.slurm.queue import GOING, WAITING, Recorded, Seen
from gptctl.engine.contract import NO_ENGINE_PYTHON
from gptctl.engine.run_folder import (
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
    RunFolder,
    read_text,
)
from gptctl.jobs.store import JobRecord

# Such as `slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2024-05-01T10:00:00 DUE TO PREEMPTION ***`
LAST_WORDS = re.compile(
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
    **dict.fromkeys(WAITING, PENDING),
    **dict.fromkeys(GOING, RUNNING),
}
# Reasons for which a job waits until somebody changes it or the cluster.
HOPELESS = re.compile(
    "BadConstraints|Partition(Node|Time)Limit|(Account|QOS)NotAllowed|Invalid(Account|QOS)|DependencyNeverSatisfied"
)
CANNOT_START = 53  # the signal by which Slurm says that it could not begin with a batch script


def as_seen(seen: Seen, folder: RunFolder, record: JobRecord) -> JobState:
    kind = STATES.get(seen.state, UNKNOWN)
    if kind == PENDING:
        return JobState(
            PENDING, "; ".join(filter(None, [_requeued(seen, folder, record), _why(seen)]))
        )
    if kind == RUNNING:
        begun = folder.attempts() and folder.rank_events(folder.attempts() - 1)
        again = f"attempt {folder.attempts() - 1}" if folder.attempts() > 1 else ""
        stage = "" if begun else "starting"
        if seen.state != "RUNNING":
            stage = seen.state.lower()
        return JobState(
            RUNNING, ", ".join(filter(None, [again, stage, _requeued(seen, folder, record)]))
        )
    if kind == UNKNOWN:
        return JobState(UNKNOWN, f"Slurm calls it {seen.state}")
    if result := folder.result():
        return JobState(result.state, result.reason)
    if kind == CANCELLED and "Dependency" in seen.reason and not folder.cancelled.exists():
        return _kept(JobState(CANCELLED, "a job that it waited for did not complete"), folder)
    return as_ended(seen.recorded, folder, record)


def _why(seen: Seen) -> str:
    expected = (
        ""
        if seen.start in ("", "N/A", "Unknown")
        else f", expected to start {seen.start.replace('T', ' ')}"
    )
    reason = "" if seen.reason in ("", "None") else seen.reason
    if HOPELESS.search(reason):
        return (
            f"{reason}: that does not pass by itself; cancel it, and ask for what the cluster has"
        )
    return f"{reason}{expected}" if reason else expected.removeprefix(", ")


def _requeued(seen: Seen, folder: RunFolder, record: JobRecord) -> str:
    if not seen.restarts:
        return ""
    times = "once" if seen.restarts == 1 else f"{seen.restarts} times"
    return f"requeued {times}{_ending_words(record, folder)}"


def _ending_words(record: JobRecord, folder: RunFolder) -> str:
    """What Slurm said of the end of the last attempt that it ended, in that attempt's output."""
    newest = folder.attempts() - 1
    for attempt in range(newest, -1, -1):
        log = read_text(Path(record.log_dir) / f"attempt-{attempt}" / "batch.log")
        if words := dict.fromkeys(match[1] for match in LAST_WORDS.finditer(log)):
            which = "" if attempt == newest else f"attempt {attempt}: "
            return f" ({which}{'; '.join(words)})"
    return ""


def as_ended(end: Recorded, folder: RunFolder, record: JobRecord) -> JobState:
    """A job that left no result: what Slurm says of its end."""
    kind = STATES.get(end.state, UNKNOWN)
    if kind == COMPLETED:
        return JobState(COMPLETED, "Slurm says so; the job could not write its own result")
    if kind == CANCELLED:
        return _kept(
            JobState(
                CANCELLED, "cancelled" if folder.cancelled.exists() else "cancelled with scancel"
            ),
            folder,
        )
    if end.signal == CANNOT_START and not folder.attempts():
        words = f"Slurm could not start its script on {end.nodes or 'a node'}: do the nodes see {record.local_dir}?"
        return _kept(JobState(kind, f"{words} gptctl doctor --cluster {record.cluster}"), folder)
    if end.code == NO_ENGINE_PYTHON and not folder.attempts():
        said = read_text(Path(record.log_dir) / "batch.log").strip().rpartition("\n")[2]
        return _kept(JobState(kind, said.removeprefix("error: ")), folder)
    facts = {"exit code": end.code, "signal": end.signal, "on": end.nodes}
    words = ", ".join(
        [
            f"Slurm calls it {end.state}",
            *(f"{name} {value}" for name, value in facts.items() if value),
        ]
    )
    return _kept(JobState(kind, f"{words}{_ending_words(record, folder)}"), folder)


def _kept(state: JobState, folder: RunFolder) -> JobState:
    """Slurm forgets a job after some minutes: what it said of its end is written down, unless it may be requeued."""
    if state.state in (CANCELLED, FAILED, TIMEOUT, OUT_OF_MEMORY) and folder.path.is_dir():
        with suppress(OSError):  # full, or another user's: then it is asked again
            folder.finish(*state)
    return state
