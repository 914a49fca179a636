"""Slurm. submitit sends our script held and with a token; only when this very job has the claim it is released.

So a reply that is lost, or a gptctl that is killed, can neither run a job twice nor lose one: what is in doubt is
looked up by its token, and a job without the claim does nothing even if somebody releases it.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from gptctl.backends import State, output_seen_here
from gptctl.backends.slurm import client as slurm
from gptctl.backends.slurm.client import QUEUE, Recorded, Seen, SlurmError
from gptctl.cli import ui
from gptctl.engine.contract import BATCH_SCRIPT
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import clean_environment, is_alive, is_here
from gptctl.engine.run_folder import (
    CANCELLED,
    COMPLETED,
    FAILED,
    LOST,
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
from gptctl.jobs.store import JobRecord, private_files
from trainer.errors import OUT_OF_REACH, UserError

SEND_PATIENCE = 60.0  # seconds for which a controller that is out of reach is tried again
SETTLE = 3.0  # seconds after which a request that was on its way has been worked off
STOP_PATIENCE = 60.0
LATE = 3600.0  # seconds after which the accounting knows a job, if it ever will

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
    **dict.fromkeys(slurm.WAITING, PENDING),
    **dict.fromkeys(slurm.GOING, RUNNING),
}
# Reasons for which a job waits until somebody changes it or the cluster.
HOPELESS = re.compile(
    "BadConstraints|Partition(Node|Time)Limit|(Account|QOS)NotAllowed|Invalid(Account|QOS)|DependencyNeverSatisfied"
)
CANNOT_START = 53  # the signal by which Slurm says that it could not begin with a batch script


def start(plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
    with private_files():
        os.makedirs(plan.log_dir, exist_ok=True)  # Slurm writes there before the job does
        os.makedirs(_sent(plan), exist_ok=True)
    deadline = time.monotonic() + SEND_PATIENCE
    job, was_doubtful = _send_once(plan, record, deadline)
    handle = {"scheduler_id": job, "host": os.uname().nodename}
    if not RunFolder(plan.run_dir).take(handle):
        raise UserError(
            f"{plan.job_id} was given up by another gptctl", "submit it again", OUT_OF_REACH
        )
    if was_doubtful:
        _cancel(other.id for other in _found(record, deadline) if other.id != job)
    _release(job, record, deadline)
    return handle


def _send_once(plan: LaunchPlan, record: JobRecord, deadline: float) -> tuple[str, bool]:
    """The job's id, and whether it was in doubt how often it was sent."""
    was_doubtful = has_said = False
    while True:
        try:
            return _sbatch(plan, record), was_doubtful
        except SlurmError as error:
            if error.is_missing:  # nothing was sent
                raise
            was_doubtful = True
            if found := _found(record, deadline):
                return found[0].id, True
            if not error.is_doubtful:
                raise
            if not has_said:
                ui.say(f"{error.said}; trying again …")
            has_said = True
            time.sleep(SETTLE)
            if found := _found(record, deadline):
                return found[0].id, True
            if time.monotonic() > deadline:
                raise


def _sbatch(plan: LaunchPlan, record: JobRecord) -> str:
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    comment = " ".join(filter(None, [record.token, plan.sbatch.get("comment", "")]))
    script = os.path.join(plan.run_dir, BATCH_SCRIPT)

    class ScriptExecutor(SlurmExecutor):
        """Sends a script of ours instead of a pickled function; what differs per submission is on the command line."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            with open(script, encoding="utf-8") as file:
                return file.read()

        def _make_submission_command(self, submission_file_path: Any) -> list[str]:
            return [
                *_clean_prefix(),
                "sbatch",
                "--hold",
                f"--comment={comment}",
                str(submission_file_path),
            ]

    try:
        with private_files(), redirect_stderr(io.StringIO()):  # submitit prints what it raises
            executor = ScriptExecutor(_sent(plan))
            return str(executor._submit_command("").job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        said = slurm.said_by(str(error)) or "sbatch was killed"
        raise slurm.failure(said) from None
    except RuntimeError as error:  # without srun submitit believes in no cluster
        raise SlurmError(
            f"there is no Slurm here: {error}", is_doubtful=False, is_missing=True
        ) from None


def _sent(plan: LaunchPlan) -> str:
    """Where submitit keeps the script as it was sent."""
    return os.path.join(plan.run_dir, "submitit")


def _clean_prefix() -> list[str]:
    """Runs a command without what would be taken for the job's own: submitit passes this process's environment on."""
    clean = clean_environment()
    gone = [word for name in os.environ if name not in clean for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in clean.items() if value != os.environ[name]]
    return ["env", *gone, *changed]


def _found(record: JobRecord, deadline: float) -> list[Seen]:
    """Jobs that were submitted for this record; waits for a controller that is out of reach."""
    has_said = False
    while True:
        try:
            return sorted(
                slurm.with_token(record.token, record.run_dir), key=lambda job: int(job.id)
            )
        except SlurmError as error:
            if not error.is_doubtful or time.monotonic() > deadline:
                raise
            if not has_said:
                ui.say(f"{error.said}; asking again …")
            has_said = True
            time.sleep(1)


def _release(job: str, record: JobRecord, deadline: float) -> None:
    has_said = False
    while True:
        try:
            slurm.run("scontrol", "release", job)
            return
        except SlurmError as error:
            found = [seen for seen in _found(record, deadline) if seen.id == job]
            if found and not found[0].is_held:
                return
            if not error.is_doubtful or time.monotonic() > deadline:
                raise
            if not has_said:
                ui.say(f"{error.said}; trying again …")
            has_said = True
            time.sleep(1)


def _cancel(jobs: Iterable[str]) -> None:
    if ids := list(jobs):
        slurm.run("scancel", *ids)


def abandon(record: JobRecord) -> bool:
    """A job that was sent but not released is taken out of the queue; without the claim it could do nothing anyway."""
    folder = RunFolder(record.run_dir)
    folder.take({"abandoned": True})
    owner = (folder.claimed_by() or {}).get("scheduler_id")
    try:
        jobs = _found(record, time.monotonic())
    except SlurmError as error:
        if error.is_missing and not owner:  # from a machine without Slurm nothing was sent
            return True
        raise
    has_begun = any(job.id == owner and not job.is_held for job in jobs)
    if owner and owner not in {
        job.id for job in jobs
    }:  # forgotten after it ran, or lost before it was released
        has_begun = folder.attempts() > 0 or folder.result() is not None
    _cancel(job.id for job in jobs if job.id != owner or not has_begun)
    return not has_begun


def expect(records: Sequence[JobRecord]) -> None:
    QUEUE.look()
    with suppress(SlurmError):  # then each says so itself
        QUEUE.look_up(
            [record.handle["scheduler_id"] for record in records if "scheduler_id" in record.handle]
        )


def following(record: JobRecord) -> AbstractContextManager[None]:
    return nullcontext()  # its folder is here


def catch_up(record: JobRecord) -> list[str]:
    return []


def state(record: JobRecord) -> State:
    folder = RunFolder(record.run_dir)
    claim = folder.claimed_by() or dict(record.handle)
    job = claim.get("scheduler_id")
    if claim.get("abandoned"):
        return State(CANCELLED, "given up before it was submitted")
    if not job and not is_here(record.submitter):
        return State(
            UNKNOWN, f"it is being submitted on {record.submitter.get('host')}, or was: ask there"
        )
    if not job:
        alive = is_alive(record.submitter)
        return (
            State(PENDING, "being submitted")
            if alive
            else State(LOST, "gptctl ended before the job was submitted")
        )
    QUEUE.look()
    seen = QUEUE.jobs.get(job)
    if (
        seen and seen.work_dir == record.run_dir
    ):  # a controller that lost its state gives the same ids out again
        return _silence(_as_seen(seen, folder, record))
    if QUEUE.silent_since is not None:
        return _silence(State(UNKNOWN))
    if result := folder.result():  # written since the caller looked
        return State(result.state, result.reason)
    try:
        known = QUEUE.record(job)
    except SlurmError as error:
        return State(
            UNKNOWN,
            f"the controller has forgotten it, and the accounting does not answer: {error.said}",
        )
    if known and known.work_dir == record.run_dir:
        return _ended(known, folder, record)
    if QUEUE.has_accounting and time.time() - record.created < LATE:
        return State(
            UNKNOWN, f"the controller does not know job {job} any more, and the accounting not yet"
        )
    where = "" if folder.path.is_dir() else f", and its folder {record.run_dir} is gone"
    return State(LOST, f"Slurm does not know job {job} any more, and it has left no result{where}")


def _silence(state: State) -> State:
    if QUEUE.silent_since is None:
        return state
    since = time.strftime("%H:%M:%S", time.localtime(QUEUE.silent_since))
    words = f"Slurm has not answered since {since}: {QUEUE.fault}"
    return State(state.state if state.state in (PENDING, RUNNING) else UNKNOWN, words)


def _as_seen(seen: Seen, folder: RunFolder, record: JobRecord) -> State:
    kind = STATES.get(seen.state, UNKNOWN)
    if kind == PENDING:
        return State(
            PENDING, "; ".join(filter(None, [_requeued(seen, folder, record), _why(seen)]))
        )
    if kind == RUNNING:
        begun = folder.attempts() and folder.rank_events(folder.attempts() - 1)
        again = f"attempt {folder.attempts() - 1}" if folder.attempts() > 1 else ""
        stage = "" if begun else "starting"
        if seen.state != "RUNNING":
            stage = seen.state.lower()
        return State(
            RUNNING, ", ".join(filter(None, [again, stage, _requeued(seen, folder, record)]))
        )
    if kind == UNKNOWN:
        return State(UNKNOWN, f"Slurm calls it {seen.state}")
    if result := folder.result():
        return State(result.state, result.reason)
    if kind == CANCELLED and "Dependency" in seen.reason and not folder.cancelled.exists():
        return _kept(State(CANCELLED, "a job that it waited for did not complete"), folder)
    return _ended(seen.recorded, folder, record)


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


def _ended(end: Recorded, folder: RunFolder, record: JobRecord) -> State:
    """A job that left no result: what Slurm says of its end."""
    kind = STATES.get(end.state, UNKNOWN)
    if kind == COMPLETED:
        return State(COMPLETED, "Slurm says so; the job could not write its own result")
    if kind == CANCELLED:
        return _kept(
            State(
                CANCELLED, "cancelled" if folder.cancelled.exists() else "cancelled with scancel"
            ),
            folder,
        )
    if end.signal == CANNOT_START and not folder.attempts():
        words = f"Slurm could not start its script on {end.nodes or 'a node'}: do the nodes see {record.run_dir}?"
        return _kept(State(kind, f"{words} gptctl doctor --cluster {record.cluster}"), folder)
    facts = {"exit code": end.code, "signal": end.signal, "on": end.nodes}
    words = ", ".join(
        [
            f"Slurm calls it {end.state}",
            *(f"{name} {value}" for name, value in facts.items() if value),
        ]
    )
    return _kept(State(kind, f"{words}{_ending_words(record, folder)}"), folder)


def _kept(state: State, folder: RunFolder) -> State:
    """Slurm forgets a job after some minutes: what it said of its end is written down, unless it may be requeued."""
    if state.state in (CANCELLED, FAILED, TIMEOUT, OUT_OF_MEMORY) and folder.path.is_dir():
        with suppress(OSError):  # full, or another user's: then it is asked again
            folder.finish(*state)
    return state


def cancel(record: JobRecord, now: bool) -> None:
    folder = RunFolder(record.run_dir)
    if folder.path.is_dir():
        folder.take({"abandoned": True})  # only if nobody has the claim: then it never starts
        folder.cancel(now)
    jobs = {job.id: job for job in _found(record, time.monotonic() + STOP_PATIENCE)}
    if any(job.state == "RUNNING" for job in jobs.values()) and folder.path.is_dir() and not now:
        _ask(jobs, record)
    QUEUE.look(now=True)
    left = [
        job.id
        for job in QUEUE.jobs.values()
        if job.id in jobs and STATES.get(job.state) in (PENDING, RUNNING)
    ]
    if left:
        if now:
            _try("scancel", "--signal=KILL", "--full", *left)
        slurm.run("scancel", *left)
    _wait_until_ended(set(jobs), record)
    if folder.path.is_dir() and not folder.result():
        folder.finish(CANCELLED, "cancelled")


def _ask(jobs: dict[str, Seen], record: JobRecord) -> None:
    """The batch script asks the ranks to save, and ends; it is not waited for longer than they have time."""
    _try("scancel", "--signal=USR1", "--batch", *jobs)
    deadline = time.monotonic() + STOP_PATIENCE
    while time.monotonic() < deadline and not RunFolder(record.run_dir).result():
        QUEUE.look()  # one that was killed leaves no result
        if QUEUE.silent_since is None and not any(_runs(job) for job in jobs):
            return
        time.sleep(0.2)


def _runs(job: str) -> bool:
    return job in QUEUE.jobs and STATES.get(QUEUE.jobs[job].state) == RUNNING


def _try(*command: str) -> None:
    try:
        slurm.run(*command)
    except SlurmError as error:
        if error.is_doubtful:
            raise


def _wait_until_ended(jobs: set[str], record: JobRecord) -> None:
    deadline = time.monotonic() + STOP_PATIENCE
    while time.monotonic() < deadline:
        QUEUE.look(now=True)
        left = [QUEUE.jobs[job] for job in jobs if job in QUEUE.jobs]
        if QUEUE.silent_since is None and not any(
            STATES.get(job.state) in (PENDING, RUNNING) for job in left
        ):
            return
        time.sleep(1)
    raise UserError(
        f"{record.id} has not ended in {STOP_PATIENCE:.0f} s",
        "ask again: gptctl status",
        OUT_OF_REACH,
    )


output = output_seen_here
