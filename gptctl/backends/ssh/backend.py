"""Machines without a scheduler, reached by ssh. An agent on each of them runs the job.

gptctl keeps a copy of the job's folder on this machine, and reads logs and state from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from gptctl.backends import Backend, JobState, half_submitted, recorded_state
from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.cause import cause_in_message
from gptctl.engine.contract import AGENT_SCRIPT, LAUNCH_SCRIPT
from gptctl.engine.error_text import one_line
from gptctl.engine.host_commands import NOW_TIMEOUT
from gptctl.engine.job_result import (
    CANCELLED,
    LONGEST_REASON,
    LOST,
    PENDING,
    RUNNING,
    UNKNOWN,
)
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import ABANDONED, RunFolder
from gptctl.jobs.last_state import last_state_text, remember
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site
from gptctl.remote.answers import handle_of
from gptctl.remote.connection import routes
from gptctl.remote.host_error import HostError
from gptctl.remote.host_sync import HostSync
from gptctl.remote.link import HostLinks
from gptctl.remote.log_sync import LogSync, catch_up
from gptctl.remote.parallel import in_parallel
from gptctl.reporting import Fetched, FetchOptions, Say, ShowProgress
from gptctl.spec.check import Checked
from gptctl.spec.cluster import cluster_of_job
from gptctl.spec.resources import home
from gptctl.text import count, some_of
from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    from gptctl.backends.ssh.launcher import Launcher

END_TIMEOUT = 120.0  # seconds in which a host must stop a job whose ranks may save first
MAX_NAMED = 10  # processes that one message names; a host may list any number


class SshBackend(Backend):
    scripts: ClassVar[tuple[str, ...]] = (AGENT_SCRIPT, LAUNCH_SCRIPT)

    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        self._say = say
        self._links = HostLinks(limit)
        self._syncs: dict[str, LogSync] = {}  # by job id, with open connections

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        # Hosts do not have the current folder, only the files that are sent with the job.
        code = os.path.join(identity.remote_dir, "code") if identity.remote_dir else ""
        return PlanDefaults(
            rdzv_id=checked.launch.job_name, python="python", work_dir=code, pins_interface=True
        )

    def local_dir(self, plan: LaunchPlan) -> str:
        return str(home() / "runs" / plan.job_id)

    def sync_of(self, record: JobRecord) -> LogSync:
        if record.id not in self._syncs:
            cluster = cluster_of_job(record.run_folder)
            if len(cluster.hosts) < record.nodes:
                message = f"{record.run_folder}/cluster.json does not list the hosts of the job"
                raise UserError(message, "check and stop it on its hosts by hand", OUT_OF_REACH)
            links = [self._links.to(route) for route in routes(cluster)[: record.nodes]]
            self._syncs[record.id] = LogSync(record, links, cluster.shared_fs)
        return self._syncs[record.id]

    def watched_folder(self, record: JobRecord, checked: Checked) -> str | None:
        if record.kind != checked.cluster.kind:
            return None
        # The result of a job is on its first host, where the agent of the new one must run, too.
        other, own = self.sync_of(record).plan, checked.cluster.hosts[0]
        return other.remote_dir if other.hosts[0] == (own.address or own.host) else None

    # Starting

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        from gptctl.backends.ssh.launcher import Launcher

        folder = RunFolder(record.local_dir)
        launcher = Launcher(plan, record, self._links.jump_hosts, self._say)
        try:
            _prepare(launcher, folder)
            # From here on the job may run, even if the reply never arrives. Recorded before the
            # commit, so that a gptctl that is killed meanwhile does not remove a running job.
            folder.in_doubt_file.touch(mode=0o600)
            answer = launcher.commit()
        except HostError as error:
            # What is asked of the host next need not wait for it again.
            self.sync_of(record)
            self._links.remember_error(error)
            raise
        finally:
            launcher.close()
        host, port = answer["endpoint"]
        handle = handle_of(answer["committed"], host)
        # Record here what the first host has: state and logs are read from this folder.
        with private_files():
            folder.try_claim(handle)
            folder.set_waiting(one_line(answer.get("waiting", ""), LONGEST_REASON))
            if port is not None:
                folder.attempt(0).mkdir()
                with replacing(folder.attempt(0) / "endpoint.json") as stream:
                    stream.write(json.dumps({"host": host, "port": port}).encode())
        return handle

    def abandon(self, record: JobRecord) -> bool:
        """Let the first host decide: once its agent has the claim, the job exists."""
        folder = RunFolder(record.local_dir)
        if (folder.claimed_by() or {}).get("abandoned"):
            return True
        head, *others = self.sync_of(record).hosts
        answer = _kill(head, "abandon") or {}
        claim = answer.get("claim") or ABANDONED
        if not claim.get("abandoned"):
            folder.try_claim(handle_of(claim, head.route.name))
            return False
        asked = in_parallel(lambda host: _kill(host, "abandon"), others)
        for result in asked:
            if isinstance(result, Exception):
                raise result
        return True

    # States

    def prefetch_states(self, records: Sequence[JobRecord]) -> None:
        started = [record for record in records if record.handle]
        # Around all threads: the umask belongs to the process, not to a thread.
        with private_files():
            in_parallel(lambda record: self.sync_of(record).refresh(), started)
            for record in started:
                self._check_not_ended(record)

    def _check_not_ended(self, record: JobRecord) -> None:
        """Forget the hosts that answer by now that nothing of an ended job is left there."""
        folder = RunFolder(record.local_dir)
        if hosts := folder.not_ended():
            sync = self.sync_of(record)
            sync.refresh()
            left = sync.not_ended()
            folder.set_not_ended(host for host in hosts if host in left)

    def state(self, record: JobRecord) -> JobState:
        if not record.handle:
            return _half_submitted(record)
        try:
            sync = self.sync_of(record)
        # The job's folder here or the user's ssh config is damaged.
        except UserError as error:
            return JobState(UNKNOWN, error.message)
        sync.refresh()
        unreachable = sync.unreachable()
        if result := RunFolder(record.local_dir).result():
            return recorded_state(result)
        head = sync.hosts[0]
        if head.unreachable_reason:
            return JobState(UNKNOWN, "; ".join(unreachable) + last_state_text(record))
        state = _as_reported(head.route.name, head.status, record, unreachable)
        remember(record, state.state)
        # Nobody has recorded a result: the hosts themselves say what is left.
        if state.state == LOST:
            with private_files():
                RunFolder(record.local_dir).set_not_ended(sync.not_ended())
        return state

    def is_over(self, record: JobRecord) -> bool:
        folder = RunFolder(record.local_dir)
        result = folder.result()
        # The engine of an older job did not record which hosts it could not stop: ask them.
        return result is not None and result.not_ended is not None and not folder.not_ended()

    # Cancelling

    def before_cancel(self, record: JobRecord) -> None:
        # A damaged folder: the state says so.
        with suppress(UserError):
            self.sync_of(record).only_asks = True

    def cancel(self, record: JobRecord, now: bool) -> None:
        """Let the first host stop all ranks gently, then kill what is left on every host."""
        sync, folder = self.sync_of(record), RunFolder(record.local_dir)
        # A full disk here is no reason to let the job run: the hosts have files of their own.
        with suppress(OSError):
            folder.cancel(now)
        # The agent of the first host lets the ranks of all hosts save, and records the result.
        if not now:
            with suppress(HostError):
                sync.hosts[0].ask("end", "gently", timeout=END_TIMEOUT)
        # A host that lost its connection to the first one may still run ranks.
        answers = in_parallel(lambda host: _kill(host, "end", "now"), sync.hosts)
        # A host counts as stopped only if it says so.
        found = zip(sync.hosts, answers)
        problems = [each for host, answer in found if (each := _not_stopped(host, answer))]
        sync.only_asks = False
        sync.refresh(0.0)
        with suppress(OSError), private_files():
            folder.set_not_ended(problem.host for problem in problems)
        if problems:
            where = "; ".join(problem.message for problem in problems)
            hint = f"cancel it again when the hosts are reachable: gptctl cancel {record.id}"
            raise UserError(
                f"{record.id} could not be stopped on all hosts: {where}", hint, OUT_OF_REACH
            )
        if not folder.result():
            # The gptctl that was submitting the job may have removed its folder by now.
            with suppress(FileNotFoundError), private_files():
                folder.finish(CANCELLED, "", not_ended=())

    def node_command(
        self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool
    ) -> list[str]:
        from gptctl.remote.scripts import remote_command
        from gptctl.remote.ssh_program import ssh_words

        sync = self.sync_of(record)
        script = remote_command("run_module.sh", sync.plan.remote_dir, record.token, *words)
        return ssh_words(sync.hosts[node].route, script, has_terminal)

    # Files

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        return self.sync_of(record).keep_updated()

    def await_hosts(self, record: JobRecord) -> None:
        with suppress(UserError):
            self.sync_of(record).await_hosts()

    def want_logs(self, record: JobRecord, max_size: int | None) -> None:
        if record.handle:
            self.sync_of(record).want_all(max_size)

    def catch_up(self, record: JobRecord) -> list[str]:
        with private_files():
            self._check_not_ended(record)
        return catch_up(record, self.sync_of)

    def checkpoints(self, record: JobRecord) -> tuple[str, list[str]]:
        return self.sync_of(record).checkpoints()

    def remove(self, record: JobRecord) -> None:
        sync = self.sync_of(record)
        # With a shared folder one host is enough, and two would disturb each other.
        answers = in_parallel(HostSync.remove_folder, sync.with_files)
        problems = [answer for answer in answers if isinstance(answer, Exception)]
        if problems:
            where = "; ".join(getattr(problem, "message", str(problem)) for problem in problems)
            hint = "run it again when the hosts are reachable; --here removes only the copy here"
            raise UserError(
                f"{record.id} could not be removed on all hosts: {where}", hint, OUT_OF_REACH
            )

    def is_elsewhere(self, record: JobRecord) -> bool:
        return True

    def fetch(self, record: JobRecord, options: FetchOptions, show: ShowProgress) -> Fetched:
        from gptctl.remote.fetch import fetch

        return fetch(record, self.sync_of(record), options, self._say, show)


def _prepare(launcher: Launcher, folder: RunFolder) -> None:
    try:
        launcher.prepare()
        # `cancel` may have asked the hosts before they had the job.
        _refuse_if_cancelled(folder)
    # An interrupt, too. Agents that cannot be reached from here roll back when their lease expires.
    except BaseException as error:
        folder.try_claim(ABANDONED)
        launcher.roll_back()
        # It was `cancel` that stopped the agents: the hosts have no problem.
        if isinstance(error, UserError):
            _refuse_if_cancelled(folder)
        raise


def _refuse_if_cancelled(folder: RunFolder) -> None:
    if folder.is_cancelled():
        message = f"{folder.path.name} was cancelled while it was being started; nothing runs"
        raise UserError(message) from None


def _kill(host: HostSync, *command: str) -> dict[str, Any] | None:
    """Ask a host to end a job at once. Its agent may need a moment more than an answer."""
    return host.ask(*command, timeout=host.route.patience + NOW_TIMEOUT)


def _not_stopped(host: HostSync, answer: Any) -> HostError | None:
    """What a host's answer to `end` says of processes that may still run there."""
    name = host.route.name
    if isinstance(answer, HostError):
        # Its jump host may be the one that does not answer.
        what = answer.detail if answer.host == name else answer.message
        return HostError(name, what, answer.hint)
    if isinstance(answer, Exception):
        return HostError(name, repr(answer))
    left = [str(pid) for pid in answer["left"]] if answer else []
    problem = f"cannot kill {count(len(left), 'process', 'processes')}: {some_of(left, MAX_NAMED)}"
    return HostError(name, problem) if left else None


def _half_submitted(record: JobRecord) -> JobState:
    state = half_submitted(record)
    if state.state == LOST and RunFolder(record.local_dir).in_doubt_file.exists():
        reason = "gptctl lost the connection to the first host while it started the job"
        return JobState(UNKNOWN, reason)
    return state


def _as_reported(
    name: str, status: Mapping[str, Any] | None, record: JobRecord, unreachable: Sequence[str]
) -> JobState:
    """Derive the state from what the first host reports."""
    if status is None:
        return JobState(LOST, f"its folder on {name} is missing")
    if status["agents"]:
        folder = RunFolder(record.local_dir)
        if waiting := _waiting_for(status, folder):
            return JobState(PENDING, "; ".join([waiting, *unreachable]))
        begun = folder.has_ranks(folder.attempts() - 1)
        return JobState(RUNNING, "; ".join([*([] if begun else ["starting"]), *unreachable]))
    # The result may not be here yet, if another gptctl process writes the copy.
    if status["result"]:
        final, reason, *rest = status["result"]
        # One line: a host must not be able to forge rows of `gptctl list`.
        safe = one_line(reason, LONGEST_REASON)
        return JobState(final, safe, cause_in_message(rest[1]) if len(rest) > 1 else None)
    if status["processes"]:
        return JobState(RUNNING, f"its agent on {name} was killed, and processes are left there")
    is_same_boot = status["boot"] == record.handle.get("boot")
    reason = f"its agent on {name} was killed" if is_same_boot else f"{name} was restarted"
    return JobState(LOST, reason)


def _waiting_for(status: Mapping[str, Any], folder: RunFolder) -> str:
    """What the job waits for on its first host; the folder here gets the same note."""
    # An agent of an older gptctl does not report it.
    reported = status.get("waiting")
    # As the folder reads it, so that an equal note is not written again.
    waiting = one_line(reported, LONGEST_REASON) if isinstance(reported, str) else ""
    if waiting != folder.waiting_for():
        with suppress(OSError), private_files():
            folder.set_waiting(waiting)
    return waiting
