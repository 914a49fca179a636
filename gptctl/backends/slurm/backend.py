"""Slurm. gptctl submits a job held and with a token, lets it take the claim, and releases it then.

So a lost reply or a killed gptctl can neither run a job twice nor lose it: gptctl finds a job whose
submission is in doubt by its token, and a job without the claim does nothing, even if released.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from shutil import which
from typing import Any, ClassVar, TypeVar

from gptctl.backends import Backend, JobState, half_submitted, recorded_state
from gptctl.backends.slurm import client
from gptctl.backends.slurm.client import SlurmError
from gptctl.backends.slurm.node_steps import step_on_node
from gptctl.backends.slurm.options import sbatch_options
from gptctl.backends.slurm.queue import Queue, QueuedJob, find_submitted
from gptctl.backends.slurm.states import STATES, state_after_end, state_in_queue
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import BATCH_SCRIPT, LAUNCH_SCRIPT
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import clean_environment
from gptctl.engine.run_folder import CANCELLED, LOST, PENDING, RUNNING, UNKNOWN, RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site, log_dir_of
from gptctl.planning.container import NOT_MOUNTABLE
from gptctl.reporting import Say
from gptctl.spec.check import Checked
from trainer.errors import OUT_OF_REACH, Finding, Rule, UserError

ACCEPTED = Rule("S008", "the scheduler must accept the job")
MOUNTABLE = Rule("S015", "folders of a pyxis job must not contain commas, colons or spaces")
BACKSLASH = Rule("S009", "paths of a Slurm job must not contain a backslash: Slurm interprets it")

SEND_TIMEOUT = 60.0  # seconds for which an unreachable controller is tried again
REQUEST_DELAY = 3.0  # seconds after which Slurm has processed a request that was still on its way
STOP_TIMEOUT = 60.0  # seconds
ACCOUNTING_DELAY = 3600.0  # seconds until the accounting knows a job, if it ever will

T = TypeVar("T")


class SlurmBackend(Backend):
    scripts: ClassVar[tuple[str, ...]] = (BATCH_SCRIPT, LAUNCH_SCRIPT)

    def __init__(self, say: Say) -> None:
        self._say = say
        self.queue = Queue()

    # Before a job is submitted

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        log_dir = log_dir_of(checked.launch, site, identity)
        options = sbatch_options(checked, identity.remote_dir, log_dir)
        return PlanDefaults(style="sbatch", has_own_port=True, sbatch=options)

    def preflight(self, checked: Checked, plan: LaunchPlan) -> Iterator[Finding]:
        for key, path in {"run_root": plan.remote_dir, "Launch.log_dir": plan.log_dir}.items():
            if "\\" in path:
                message = f"{path} contains a backslash"
                yield BACKSLASH.found(key, path, message, "choose another folder")
                return
        own = {"run_root": plan.remote_dir, "Launch.log_dir": plan.log_dir, "cwd": plan.work_dir}
        for key, path in own.items() if plan.srun_container else ():
            if NOT_MOUNTABLE.search(path):
                message = f"pyxis cannot mount {path}, which has a comma, a colon or a space"
                yield MOUNTABLE.found(key, path, message, "choose another folder")
                return

    def expected_start(self, checked: Checked, site: Site) -> tuple[list[Finding], str]:
        from gptctl.planning.render import render

        if not which("sbatch"):
            return [_not_asked(checked, "sbatch is not installed here")], ""
        folder = os.path.join(site.absolute(checked.cluster.run_root), "validate")
        script = render(self.plan(checked, site, JobIdentity("validate", folder)), BATCH_SCRIPT)
        try:
            return [], client.would_start(script)
        except SlurmError as error:
            # Slurm did not answer: that says nothing about the job.
            if error.is_doubtful or error.is_missing:
                return [_not_asked(checked, error.detail)], ""
            message = f"Slurm rejects it: {error.detail}"
            hint = "`sinfo` shows partitions and limits"
            return [ACCEPTED.found("Launch.cluster", checked.cluster.name, message, hint)], ""

    # Submitting

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        with private_files():
            # Slurm opens its log file there before the job starts.
            os.makedirs(plan.log_dir, exist_ok=True)
            os.makedirs(_submitit_folder(plan), exist_ok=True)
        deadline = time.monotonic() + SEND_TIMEOUT
        # 1. Submit it held: Slurm must not start it before gptctl knows its id.
        job, was_doubtful = self._send_once(plan, record, deadline)
        handle = {"scheduler_id": job, "host": os.uname().nodename}
        # 2. Give it the claim: of several Slurm jobs for this folder only this one does anything.
        if not RunFolder(plan.remote_dir).try_claim(handle):
            message = f"another gptctl process undid the submission of {plan.job_id}"
            raise UserError(message, "submit it again", OUT_OF_REACH)
        # 3. Remove the others, if a request was repeated because its reply was lost.
        if was_doubtful:
            _cancel(other.id for other in self._found(record, deadline) if other.id != job)
        # 4. Only now let Slurm start it.
        self._release(job, record, deadline)
        return handle

    def _send_once(self, plan: LaunchPlan, record: JobRecord, deadline: float) -> tuple[str, bool]:
        """Submit the job; return its id, and whether it may have been submitted more than once."""
        was_doubtful = is_reported = False
        while True:
            try:
                return _sbatch(plan, record), was_doubtful
            except SlurmError as error:
                # Without sbatch nothing was sent.
                if error.is_missing:
                    raise
                was_doubtful = True
                # Slurm may have accepted the job although sbatch failed: look for its token first.
                if found := self._found(record, deadline):
                    return found[0].id, True
                if not error.is_doubtful:
                    raise
                if not is_reported:
                    self._say(f"{error.detail}; trying again …")
                is_reported = True
                # The request may still be on its way: wait, and look again before sending another.
                time.sleep(REQUEST_DELAY)
                if found := self._found(record, deadline):
                    return found[0].id, True
                if time.monotonic() > deadline:
                    raise

    def _found(self, record: JobRecord, deadline: float) -> list[QueuedJob]:
        """Find the Slurm jobs that were submitted for this record, the oldest first."""

        def ask() -> list[QueuedJob]:
            return sorted(
                find_submitted(record.token, record.local_dir), key=lambda job: int(job.id)
            )

        return self._retried(ask, deadline)

    def _release(self, job: str, record: JobRecord, deadline: float) -> None:
        def release() -> None:
            try:
                client.run("scontrol", "release", job)
            # The reply may have been lost after Slurm released the job.
            except SlurmError:
                found = [seen for seen in self._found(record, deadline) if seen.id == job]
                if not found or found[0].is_held:
                    raise

        self._retried(release, deadline)

    def _retried(self, action: Callable[[], T], deadline: float) -> T:
        """Repeat a request until Slurm answers or the deadline has passed."""
        is_reported = False
        while True:
            try:
                return action()
            except SlurmError as error:
                if not error.is_doubtful or time.monotonic() > deadline:
                    raise
                if not is_reported:
                    self._say(f"{error.detail}; trying again …")
                is_reported = True
                time.sleep(1)

    def abandon(self, record: JobRecord) -> bool:
        """Remove a job that was submitted but not released from the queue."""
        folder = RunFolder(record.local_dir)
        # Without the claim the job does nothing, even if it cannot be removed now.
        folder.try_claim({"abandoned": True})
        owner = (folder.claimed_by() or {}).get("scheduler_id")
        try:
            jobs = self._found(record, time.monotonic())
        except SlurmError as error:
            # Nothing can have been submitted from a machine without Slurm.
            if error.is_missing and not owner:
                return True
            raise
        has_begun = any(job.id == owner and not job.is_held for job in jobs)
        if owner and owner not in {job.id for job in jobs}:
            # Slurm has forgotten it after it ran, or lost it before it was released.
            has_begun = folder.attempts() > 0 or folder.result() is not None
        _cancel(job.id for job in jobs if job.id != owner or not has_begun)
        return not has_begun

    # States

    def prefetch_states(self, records: Sequence[JobRecord]) -> None:
        self.queue.refresh()
        # `state` reports the error for each job.
        with suppress(SlurmError):
            ids = [record.handle.get("scheduler_id") for record in records]
            self.queue.query_accounting([job for job in ids if job])

    def state(self, record: JobRecord) -> JobState:
        folder = RunFolder(record.local_dir)
        claim = folder.claimed_by() or dict(record.handle)
        job = claim.get("scheduler_id")
        if claim.get("abandoned"):
            return JobState(CANCELLED, "abandoned before it was submitted")
        if not job:
            return half_submitted(record)
        self.queue.refresh()
        seen = self.queue.jobs.get(job)
        # A controller that lost its state assigns the same ids again: compare the folder, too.
        if seen and seen.work_dir == record.local_dir:
            return self._with_outage(state_in_queue(seen, folder, record))
        if self.queue.silent_since is not None:
            return self._with_outage(JobState(UNKNOWN))
        # The job may have ended between the caller's check and this one.
        if result := folder.result():
            return recorded_state(result)
        return self._forgotten(job, folder, record)

    def _forgotten(self, job: str, folder: RunFolder, record: JobRecord) -> JobState:
        """Return the state of a job that the controller does not know any more."""
        try:
            known = self.queue.record(job)
        except SlurmError as error:
            reason = "it is not in the queue any more, and sacct does not answer"
            return JobState(UNKNOWN, f"{reason}: {error.detail}")
        if known and known.work_dir == record.local_dir:
            return state_after_end(known, folder, record)
        if self.queue.has_accounting and time.time() - record.created < ACCOUNTING_DELAY:
            reason = f"job {job} is not in the queue any more, and not in the accounting yet"
            return JobState(UNKNOWN, reason)
        where = "" if folder.path.is_dir() else f", and its folder {record.local_dir} is missing"
        reason = f"Slurm does not know job {job} any more, and it recorded no result{where}"
        return JobState(LOST, reason)

    def _with_outage(self, state: JobState) -> JobState:
        """Add to the last known state that Slurm does not answer, if so."""
        if self.queue.silent_since is None:
            return state
        since = time.strftime("%H:%M:%S", time.localtime(self.queue.silent_since))
        reason = f"Slurm has not answered since {since}: {self.queue.last_error}"
        return JobState(state.state if state.state in (PENDING, RUNNING) else UNKNOWN, reason)

    # Cancelling

    def cancel(self, record: JobRecord, now: bool) -> None:
        folder = RunFolder(record.local_dir)
        has_folder = folder.path.is_dir()
        if has_folder:
            # Has no effect if a Slurm job has the claim; else no Slurm job can get it any more.
            folder.try_claim({"abandoned": True})
            folder.cancel(now)
        jobs = {job.id: job for job in self._found(record, time.monotonic() + STOP_TIMEOUT)}
        claimed = (folder.claimed_by() or {}).get("scheduler_id")
        # A cluster may hide jobs from squeue. The name: ids are used again after some years.
        if claimed and claimed not in jobs and not folder.result():
            _try("scancel", f"--name={record.name}", claimed)
        is_running = any(job.state == "RUNNING" for job in jobs.values())
        if is_running and has_folder and not now:
            self._ask_to_save(jobs, record)
        self.queue.refresh(now=True)
        unfinished = [job.id for job in self._unfinished(set(jobs))]
        if unfinished:
            # --full: the batch script and its child processes, too.
            if now:
                _try("scancel", "--signal=KILL", "--full", *unfinished)
            client.run("scancel", *unfinished)
        self._wait_until_ended(set(jobs), record)
        if has_folder and not folder.result():
            folder.finish(CANCELLED, "")

    def node_command(
        self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool
    ) -> list[str]:
        return step_on_node(RunFolder(record.local_dir), node, words, has_terminal)

    def _unfinished(self, jobs: set[str]) -> list[QueuedJob]:
        known = [self.queue.jobs[job] for job in jobs if job in self.queue.jobs]
        return [job for job in known if STATES.get(job.state) in (PENDING, RUNNING)]

    def _ask_to_save(self, jobs: dict[str, QueuedJob], record: JobRecord) -> None:
        """Ask the engine to let the ranks save, and wait until it has recorded the result."""
        _try("scancel", "--signal=USR1", "--batch", *jobs)
        deadline = time.monotonic() + STOP_TIMEOUT
        while time.monotonic() < deadline and not RunFolder(record.local_dir).result():
            # A job that was killed records no result: check that it still runs.
            self.queue.refresh()
            if self.queue.silent_since is None and not any(map(self._is_running, jobs)):
                return
            time.sleep(0.2)

    def _is_running(self, job: str) -> bool:
        return job in self.queue.jobs and STATES.get(self.queue.jobs[job].state) == RUNNING

    def _wait_until_ended(self, jobs: set[str], record: JobRecord) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT
        while time.monotonic() < deadline:
            self.queue.refresh(now=True)
            if self.queue.silent_since is None and not self._unfinished(jobs):
                return
            time.sleep(1)
        message = f"{record.id} did not stop within {STOP_TIMEOUT:.0f} s"
        raise UserError(message, f"check again: gptctl status {record.id}", OUT_OF_REACH)


def _not_asked(checked: Checked, why: str) -> Finding:
    rule = ACCEPTED._replace(level="notice")
    message = f"cannot ask Slurm whether it accepts the job: {why}"
    hint = "run this command on a login node"
    return rule.found("Launch.cluster", checked.cluster.name, message, hint)


def _sbatch(plan: LaunchPlan, record: JobRecord) -> str:
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    # The token comes first; a comment of the user is kept.
    comment = " ".join(filter(None, [record.token, plan.sbatch.get("comment", "")]))
    script = os.path.join(plan.remote_dir, BATCH_SCRIPT)

    class ScriptExecutor(SlurmExecutor):
        """Submits our script instead of a pickled function."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            with open(script, encoding="utf-8") as file:
                return file.read()

        def _make_submission_command(self, submission_file_path: Any) -> list[str]:
            # On the command line, so that the script is exactly what --dry-run printed.
            own = ["--hold", f"--comment={comment}"]
            return [*_clean_prefix(), "sbatch", *own, str(submission_file_path)]

    try:
        # submitit prints the errors that it raises.
        with private_files(), redirect_stderr(io.StringIO()):
            executor = ScriptExecutor(_submitit_folder(plan))
            return str(executor._submit_command("").job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        said = client.error_text(str(error)) or "sbatch was killed"
        raise client.failure(said) from None
    # submitit raises it where srun is not installed.
    except RuntimeError as error:
        said = f"Slurm is not installed here: {error}"
        raise SlurmError(said, is_doubtful=False, is_missing=True) from None


def _submitit_folder(plan: LaunchPlan) -> str:
    """Return the folder where submitit keeps the script as it was submitted."""
    return os.path.join(plan.remote_dir, "submitit")


def _clean_prefix() -> list[str]:
    """Drop variables that sbatch would take for the job's own."""
    # submitit starts sbatch with the environment of this process, so `env` has to remove them.
    clean = clean_environment()
    dropped = [word for name in os.environ if name not in clean for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in clean.items() if value != os.environ[name]]
    return ["env", *dropped, *changed]


def _cancel(jobs: Iterable[str]) -> None:
    if ids := list(jobs):
        client.run("scancel", *ids)


def _try(*command: str) -> None:
    """Run a command whose refusal does not matter, such as a signal to a job that has ended."""
    try:
        client.run(*command)
    except SlurmError as error:
        if error.is_doubtful:
            raise
