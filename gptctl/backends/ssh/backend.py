"""Machines without a scheduler, reached by ssh. An agent on each of them runs the job.

gptctl keeps a copy of the job's folder on this machine, and reads logs and state from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptctl.backends import Backend, JobState, half_submitted, recorded_state
from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.cause import cause_in_message
from gptctl.engine.contract import AGENT_SCRIPT, LAUNCH_SCRIPT
from gptctl.engine.error_text import one_line
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import (
    CANCELLED,
    LONGEST_REASON,
    LOST,
    PENDING,
    RUNNING,
    UNKNOWN,
    RunFolder,
)
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site
from gptctl.remote.connection import Connection, JumpHosts, routes
from gptctl.remote.host_error import HostError
from gptctl.remote.host_sync import HostSync
from gptctl.remote.link import HostLink
from gptctl.remote.log_sync import LogSync, is_copied
from gptctl.remote.parallel import in_parallel
from gptctl.reporting import Fetched, Say, ShowProgress
from gptctl.spec.check import Checked
from gptctl.spec.cluster import cluster_of_job
from gptctl.spec.resources import home
from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    from gptctl.backends.ssh.launcher import Launcher

MAX_JOBS = 4  # queried at the same time: sshd accepts only a few connections at once
END_TIMEOUT = 120.0  # seconds in which a host must stop a job


class SshBackend(Backend):
    scripts: ClassVar[tuple[str, ...]] = (AGENT_SCRIPT, LAUNCH_SCRIPT)

    def __init__(self, say: Say) -> None:
        self._say = say
        self._jump_hosts = JumpHosts()
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
            used = routes(cluster)[: record.nodes]
            links = [
                HostLink(route, partial(Connection, route, self._jump_hosts)) for route in used
            ]
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
        launcher = Launcher(plan, record, self._jump_hosts, self._say)
        try:
            _prepare(launcher, folder)
            # From here on the job may run, even if the reply never arrives. Recorded before the
            # commit, so that a gptctl that is killed meanwhile does not remove a running job.
            folder.in_doubt_file.touch(mode=0o600)
            answer = launcher.commit()
        finally:
            launcher.close()
        host, port = answer["endpoint"]
        handle = {**answer["committed"], "host": host}
        # Record here what the first host has: state and logs are read from this folder.
        with private_files():
            folder.try_claim(handle)
            folder.set_waiting(answer.get("waiting", ""))
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
        claim = (head.ask("abandon") or {}).get("claim") or {"abandoned": True}
        if not claim.get("abandoned"):
            folder.try_claim({**claim, "host": head.route.name})
            return False
        for result in in_parallel(lambda host: host.ask("abandon"), others):
            if isinstance(result, Exception):
                raise result
        return True

    # States

    def prefetch_states(self, records: Sequence[JobRecord]) -> None:
        started = [record for record in records if record.handle]
        # Around all threads: the umask belongs to the process, not to a thread.
        with private_files():
            in_parallel(lambda record: self.sync_of(record).refresh(), started, MAX_JOBS)

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
            return JobState(UNKNOWN, "; ".join(unreachable))
        return _as_reported(head.route.name, head.status, record, unreachable)

    # Cancelling

    def cancel(self, record: JobRecord, now: bool) -> None:
        """Let the first host stop all ranks gently, then kill what is left on every host."""
        sync, folder = self.sync_of(record), RunFolder(record.local_dir)
        folder.cancel(now)
        # The agent of the first host lets the ranks of all hosts save, and records the result.
        if not now:
            with suppress(HostError):
                sync.hosts[0].ask("end", "gently", timeout=END_TIMEOUT)
        # A host that lost its connection to the first one may still run ranks.
        answers = in_parallel(lambda host: host.ask("end", "now", timeout=END_TIMEOUT), sync.hosts)
        problems = [answer for answer in answers if isinstance(answer, HostError)]
        problems += [
            HostError(host.route.name, f"processes {answer['left']} cannot be killed")
            for host, answer in zip(sync.hosts, answers)
            if isinstance(answer, dict) and answer["left"]
        ]
        sync.refresh(0.0)
        _note_not_ended(folder, problems)
        if problems:
            where = "; ".join(problem.message for problem in problems)
            hint = f"cancel it again when the hosts are reachable: gptctl cancel {record.id}"
            raise UserError(
                f"{record.id} could not be stopped on all hosts: {where}", hint, OUT_OF_REACH
            )
        if not folder.result():
            with private_files():
                folder.finish(CANCELLED, "")

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

    def catch_up(self, record: JobRecord) -> list[str]:
        is_complete = not record.handle or is_copied(record)
        return [] if is_complete else self.sync_of(record).catch_up()

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

    def fetch(
        self, record: JobRecord, target: str | None, checkpoints: bool, show: ShowProgress
    ) -> Fetched:
        from gptctl.remote.fetch import fetch

        return fetch(record, self.sync_of(record), target, checkpoints, self._say, show)


def _prepare(launcher: Launcher, folder: RunFolder) -> None:
    try:
        launcher.prepare()
    # An interrupt, too. Agents that cannot be reached from here roll back when their lease expires.
    except BaseException:
        folder.try_claim({"abandoned": True})
        launcher.roll_back()
        raise


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
        reason = f"its agent on {name} was killed: no restarts, and no time limit"
        return JobState(RUNNING, reason)
    is_same_boot = status["boot"] == record.handle.get("boot")
    reason = f"its agent on {name} was killed" if is_same_boot else f"{name} was restarted"
    return JobState(LOST, reason)


def _waiting_for(status: Mapping[str, Any], folder: RunFolder) -> str:
    """What the job waits for on its first host; the folder here gets the same note."""
    # An agent of an older gptctl does not report it.
    reported = status.get("waiting")
    waiting = " ".join(reported.split()) if isinstance(reported, str) else ""
    if waiting != folder.waiting_for():
        with suppress(OSError), private_files():
            folder.set_waiting(waiting)
    return waiting


def _note_not_ended(folder: RunFolder, problems: Sequence[HostError]) -> None:
    """Record on which hosts the job must still be stopped, even if it has a result."""
    if problems:
        names = "\n".join(problem.host for problem in problems)
        folder.not_ended_file.write_text(names, encoding="utf-8")
    else:
        folder.not_ended_file.unlink(missing_ok=True)
