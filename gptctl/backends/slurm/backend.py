"""Slurm. gptctl submits a job held and with a token, lets it take the claim, and releases it then.

So a lost reply or a killed gptctl can neither run a job twice nor lose it: gptctl finds a job whose
submission is in doubt by its token, and a job without the claim does nothing, even if released.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gptctl.backends import Backend, JobState, half_submitted, recorded_state
from gptctl.backends.slurm.access import Access
from gptctl.backends.slurm.arrays import are_alike, max_array_size, was_removed
from gptctl.backends.slurm.cancelling import (
    STOP_TIMEOUT,
    ask_to_save,
    try_to_run,
    unfinished_jobs,
    wait_until_ended,
)
from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.direct_access import DirectAccess
from gptctl.backends.slurm.node_steps import step_on_node
from gptctl.backends.slurm.options import sbatch_options
from gptctl.backends.slurm.queue import Queue
from gptctl.backends.slurm.states import STATES, after_scancel, state_after_end, state_in_queue
from gptctl.backends.slurm.submission import Submission, slurm_dir
from gptctl.deadline import Deadline
from gptctl.engine.contract import BATCH_SCRIPT, LAUNCH_SCRIPT
from gptctl.engine.job_result import CANCELLED, LOST, PENDING, RUNNING, UNKNOWN
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import seconds_since_start
from gptctl.engine.run_folder import ABANDONED, RunFolder
from gptctl.jobs.last_state import last_state_text, remember
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site, log_dir_of
from gptctl.planning.container import NOT_MOUNTABLE
from gptctl.reporting import Fetched, FetchOptions, Say, ShowProgress, Waiting
from gptctl.spec.check import Checked
from gptctl.spec.cluster import Cluster, cluster_of_job
from gptctl.spec.resources import home
from trainer.errors import Finding, Rule, UserError

ACCEPTED = Rule("S008", "the scheduler must accept the job")
MOUNTABLE = Rule("S015", "folders of a pyxis job must not contain commas, colons or spaces")
BACKSLASH = Rule("S009", "paths of a Slurm job must not contain a backslash: Slurm interprets it")

ACCOUNTING_DELAY = 3600.0  # seconds until the accounting knows a job, if it ever will

if TYPE_CHECKING:
    from gptctl.backends.slurm.login_access import LoginAccess

T = TypeVar("T")


class SlurmBackend(Backend):
    scripts: ClassVar[tuple[str, ...]] = (BATCH_SCRIPT, LAUNCH_SCRIPT)

    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        self._say, self._limit = say, limit or Deadline()
        self.direct = DirectAccess(self._limit)
        self._logins: dict[str, LoginAccess] = {}  # with open connections
        self._login_of_job: dict[str, LoginAccess] = {}
        self._creating = threading.Lock()  # threads ask, each for one of several jobs

    @property
    def queue(self) -> Queue:
        return self.direct.queue

    def access(self, record: JobRecord) -> Access:
        """How this job's cluster is reached."""
        return self._login_of(record) if record.login else self.direct

    def login(self, cluster: Cluster) -> LoginAccess:
        """Access through a login host: one connection for all jobs of this command."""
        from gptctl.backends.slurm.login_access import LoginAccess

        how = repr((cluster.login, cluster.identity_file, cluster.known_hosts))
        with self._creating:
            if how not in self._logins:
                self._logins[how] = LoginAccess(cluster, self._say, self._limit)
            return self._logins[how]

    def client(self, cluster: Cluster) -> SlurmClient:
        return self.login(cluster).client if cluster.login else self.direct.client

    # Before a job is submitted

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        log_dir = log_dir_of(checked.launch, site, identity)
        options = sbatch_options(checked, identity.remote_dir, log_dir)
        defaults = PlanDefaults(style="sbatch", has_own_port=True, sbatch=options)
        if not checked.cluster.login:
            return defaults
        # The cluster has neither this interpreter nor the current folder, only what is sent.
        code = os.path.join(identity.remote_dir, "code") if identity.remote_dir else ""
        return defaults._replace(python="python", work_dir=code)

    def local_dir(self, plan: LaunchPlan) -> str:
        return str(home() / "runs" / plan.job_id) if plan.login else plan.remote_dir

    def preflight(self, checked: Checked, plan: LaunchPlan) -> Iterator[Finding]:
        if checked.cluster.login:
            from gptctl.backends.slurm.login_access import check_login

            yield from check_login(checked.cluster)
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

        cluster = checked.cluster
        if not cluster.login and not self.direct.client.has("sbatch"):
            return [_not_asked(checked, "sbatch is not installed here")], ""
        folder = os.path.join(site.absolute(cluster.run_root), "validate")
        script = render(self.plan(checked, site, JobIdentity("validate", folder)), BATCH_SCRIPT)
        try:
            return [], self.client(cluster).would_start(script)
        except SlurmError as error:
            # Slurm did not answer: that says nothing about the job.
            if not error.is_answer:
                return [_not_asked(checked, error.detail)], ""
            message = f"Slurm rejects it: {error.detail}"
            hint = "`sinfo` shows partitions and limits"
            return [ACCEPTED.found("Launch.cluster", cluster.name, message, hint)], ""
        # The ssh config has no way to the login host.
        except UserError as error:
            return [_not_asked(checked, error.message)], ""

    # Submitting

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        return self._submission(record).start(plan, record)

    def abandon(self, record: JobRecord) -> bool:
        return self._submission(record).abandon(record)

    def _submission(self, record: JobRecord) -> Submission:
        access = self.access(record)
        # The last answer does not list the new job, which would look lost.
        access.queue.expire()
        return Submission(access, self._say)

    # Arrays

    def is_array(self, plans: Sequence[LaunchPlan], numbers: Sequence[int]) -> bool:
        # Through a login host they are submitted one by one.
        if not are_alike(plans) or plans[0].login:
            return False
        return max(numbers) < max_array_size(self.direct.client)

    def array_folder(self, plan: LaunchPlan, name: str) -> str:
        return os.path.join(os.path.dirname(plan.remote_dir), name)

    def start_array(
        self, plans: Sequence[LaunchPlan], records: Sequence[JobRecord], limit: int | None
    ) -> list[dict[str, Any]]:
        return self._submission(records[0]).start_array(plans, records, limit)

    # States

    def asked_together(self, records: Sequence[JobRecord]) -> list[list[JobRecord]]:
        by_access: dict[Access | None, list[JobRecord]] = {}
        for record in records:
            access = None
            # `state` reports the error for each job.
            with suppress(UserError):
                access = self.access(record)
            by_access.setdefault(access, []).append(record)
        return list(by_access.values())

    def prefetch_states(self, records: Sequence[JobRecord]) -> None:
        try:
            access = self.access(records[0])
        except UserError:
            return
        access.queue.refresh()
        # A cluster that does not answer would only make the user wait once more.
        if access.queue.failing_since is not None:
            return
        with suppress(SlurmError):
            ids = [record.handle.get("scheduler_id") for record in records]
            access.queue.query_accounting([job for job in ids if job])

    def state(self, record: JobRecord) -> JobState:
        try:
            access = self.access(record)
        # The job's folder here or the user's ssh config is damaged.
        except UserError as error:
            return JobState(UNKNOWN, error.message)
        folder = RunFolder(record.local_dir)
        claim = folder.claimed_by() or dict(record.handle)
        job = claim.get("scheduler_id") or record.handle.get("scheduler_id")
        if claim.get("abandoned"):
            return JobState(CANCELLED, "abandoned before it was submitted")
        if not job and record.handle:
            return JobState(UNKNOWN, "its record is damaged: it has no id of Slurm")
        if not job:
            return half_submitted(record)
        try:
            state = self._known_state(job, folder, record, access)
        # The cluster was reachable a moment ago, but its last answer is not complete.
        except SlurmError as error:
            return JobState(UNKNOWN, f"{error.detail}{last_state_text(record)}")
        except UserError as error:  # its plan is damaged
            return JobState(UNKNOWN, error.message)
        if access.queue.failing_since is None:
            remember(record, state.state)
        return state

    def _known_state(
        self, job: str, folder: RunFolder, record: JobRecord, access: Access
    ) -> JobState:
        access.update(record)
        access.queue.refresh()
        seen = access.queue.jobs.get(job)
        # A controller that lost its state assigns the same ids again: compare the folder, too.
        if seen and seen.work_dir == slurm_dir(record):
            # A job that has ended is judged by what it wrote, so all of that must be here.
            has_ended = STATES.get(seen.state) not in (PENDING, RUNNING)
            if has_ended and (result := access.final_result(record)):
                return recorded_state(result)
            return self._with_outage(state_in_queue(seen, folder, record), record, access)
        if access.queue.failing_since is not None:
            return self._with_outage(JobState(UNKNOWN), record, access)
        # The job may have ended between the caller's check and this one.
        if result := access.final_result(record):
            return recorded_state(result)
        return self._forgotten(job, folder, record, access)

    def _forgotten(
        self, job: str, folder: RunFolder, record: JobRecord, access: Access
    ) -> JobState:
        """Return the state of a job that the controller does not know any more."""
        try:
            known = access.queue.record(job)
        except SlurmError as error:
            reason = "it is not in the queue any more, and sacct does not answer"
            return JobState(UNKNOWN, f"{reason}: {error.detail}")
        if known and known.work_dir == slurm_dir(record):
            return state_after_end(known, folder, record)
        if was_removed(job, record, folder, access.queue):
            return after_scancel(folder)
        if access.queue.has_accounting and _age(record) < ACCOUNTING_DELAY:
            reason = f"job {job} is not in the queue any more, and not in the accounting yet"
            return JobState(UNKNOWN, reason)
        where = "" if folder.path.is_dir() else f", and its folder {record.local_dir} is missing"
        reason = f"Slurm does not know job {job} any more, and it recorded no result{where}"
        return JobState(LOST, reason)

    def _with_outage(self, state: JobState, record: JobRecord, access: Access) -> JobState:
        """Add to the last known state that Slurm does not answer, if so."""
        queue = access.queue
        if queue.failing_since is None:
            return state
        since = time.strftime("%H:%M:%S", time.localtime(queue.failing_since))
        reason = f"Slurm has not answered since {since}: {queue.last_error}"
        if state.state in (PENDING, RUNNING):
            return JobState(state.state, reason)
        return JobState(UNKNOWN, f"{reason}{last_state_text(record)}")

    def waiting(self, record: JobRecord, state: JobState) -> Waiting:
        from gptctl.backends.slurm.waiting import waiting_in

        return waiting_in(self.access(record), record, state)

    # Cancelling

    def cancel(self, record: JobRecord, now: bool) -> None:
        access, folder = self.access(record), RunFolder(record.local_dir)
        has_folder = folder.path.is_dir()
        if has_folder:
            # Has no effect if a Slurm job has the claim; else no Slurm job can get it any more.
            access.claim(record, ABANDONED)
            access.forbid_attempts(record, now)
        jobs = {
            job.id: job
            for job in self._submission(record).found(record, time.monotonic() + STOP_TIMEOUT)
        }
        claimed = (folder.claimed_by() or {}).get("scheduler_id")
        # A cluster may hide jobs from squeue. The name: ids are used again after some years.
        if claimed and claimed not in jobs and not folder.result():
            try_to_run(access, "scancel", f"--name={record.name}", claimed)
        is_running = any(job.state == "RUNNING" for job in jobs.values())
        if is_running and has_folder and not now:
            ask_to_save(jobs, record, access)
        access.queue.refresh(now=True)
        unfinished = [job.id for job in unfinished_jobs(set(jobs), access)]
        if unfinished:
            # --full: the batch script and its child processes, too.
            if now:
                try_to_run(access, "scancel", "--signal=KILL", "--full", *unfinished)
            access.client.run("scancel", *unfinished)
        wait_until_ended(set(jobs), record, access)
        if has_folder and not access.final_result(record):
            folder.finish(CANCELLED, "")

    def node_command(
        self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool
    ) -> list[str]:
        step = step_on_node(RunFolder(record.local_dir), node, words, has_terminal)
        return self.access(record).command(step, has_terminal)

    # Files: with a login host, what is on this machine is a copy

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        return self._login_of(record).following(record) if record.login else nullcontext()

    def want_logs(self, record: JobRecord, max_size: int | None) -> None:
        if record.login:
            self._login_of(record).sync_of(record).want_all(max_size)

    def catch_up(self, record: JobRecord) -> list[str]:
        return self._login_of(record).catch_up(record) if record.login else []

    def checkpoints(self, record: JobRecord) -> tuple[str, list[str]]:
        if record.login:
            return self._login_of(record).checkpoints(record)
        return super().checkpoints(record)

    def remove(self, record: JobRecord) -> None:
        if record.login:
            self._login_of(record).remove(record)

    def is_elsewhere(self, record: JobRecord) -> bool:
        return bool(record.login)

    def fetch(self, record: JobRecord, options: FetchOptions, show: ShowProgress) -> Fetched:
        if record.login:
            return self._login_of(record).fetch(record, options, show)
        return super().fetch(record, options, show)

    def _login_of(self, record: JobRecord) -> LoginAccess:
        # The profile as it was when the job was submitted; it never changes again.
        if record.id not in self._login_of_job:
            self._login_of_job[record.id] = self.login(cluster_of_job(record.run_folder))
        return self._login_of_job[record.id]


def _not_asked(checked: Checked, why: str) -> Finding:
    rule = ACCEPTED._replace(level="notice")
    message = f"cannot ask Slurm whether it accepts the job: {why}"
    hint = "run this command on a login node, or set login in the profile"
    if checked.cluster.login:
        hint = f"check the login host: gptctl doctor --cluster {checked.cluster.name}"
    return rule.found("Launch.cluster", checked.cluster.name, message, hint)


def _age(record: JobRecord) -> float:
    """Seconds since the job was submitted."""
    # The clock may have been set since. Only if another machine submitted it, its time must do.
    age = seconds_since_start(record.submitter)
    return time.time() - record.created if age is None else age
