"""Keep the folder of a job on this machine up to date with its hosts, over SFTP.

File names contain node or rank, so the files of all hosts fit into one folder, which the rest of
gptctl reads like that of any other job. `host_sync.py` copies the files of one host.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import DamagedFile, is_time, open_at_once, read_json
from gptctl.engine.job_result import Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.jobs.store import JobRecord
from gptctl.remote.file_owners import FileOwners, newly_refused
from gptctl.remote.host_error import NOT_ASKED, HostError
from gptctl.remote.host_sync import HostSync
from gptctl.remote.limits import MAX_LOGS
from gptctl.remote.link import HostLink
from gptctl.remote.parallel import in_parallel
from gptctl.remote.sftp import OutOfTime
from gptctl.text import clock_time
from trainer.errors import OUT_OF_REACH, UserError

MAX_AGE = 3.0  # seconds for which the last answer of the hosts is used
COPY_EVERY = 0.5  # seconds between two copies of new log lines while a job is followed
LAST_TRY = 20.0  # seconds; an unreachable host is tried again after 15
STATUS_EVERY = 5.0  # seconds between two queries of its processes


def is_copied(record: JobRecord) -> bool:
    """Whether everything that an ended job wrote is here: no host was unreachable."""
    folder = RunFolder(record.local_dir)
    return folder.result() is not None and not folder.not_copied_file.exists()


def catch_up(record: JobRecord, sync_of: Callable[[JobRecord], LogSync]) -> list[str]:
    """Copy new logs to this machine; return what the user must know about the copies."""
    is_complete = not record.handle or is_copied(record)
    problems = [] if is_complete else sync_of(record).catch_up()
    return [*problems, *newly_refused(record.run_folder)]


class LogSync:
    """All hosts of a job. Of several gptctl processes one writes the copies, and all read them."""

    def __init__(
        self,
        record: JobRecord,
        links: Sequence[HostLink],
        is_shared: bool = False,
        has_agents: bool = True,
    ) -> None:
        """`is_shared`: all hosts have the same files; `has_agents`: hosts know the job's state."""
        self.record = record
        self.plan = _plan_in(record.run_folder)
        # A host that has everything is trusted with everything.
        has_all = is_shared or len(links) == 1
        owners = None if has_all else FileOwners(record.run_folder, self.plan)
        self.hosts = [
            HostSync(record, self.plan, link, node, has_agents, owners)
            for node, link in enumerate(links)
        ]
        self.with_files = self.hosts[:1] if is_shared else self.hosts
        self.max_size = MAX_LOGS
        # For a command that shows logs; others need only what can be copied in a short time.
        self.copies_all = False
        # For a command that stops the job: what the hosts wrote must not delay that.
        self.only_asks = False
        self._refreshed = float("-inf")
        self._stopped: threading.Event | None = None  # set while followers run
        self._followers: list[threading.Thread] = []
        self._lock: int | None = None

    def refresh(self, max_age: float = MAX_AGE) -> None:
        """Update status and files of all hosts, unless that was just done or followers do it."""
        is_recent = time.monotonic() - self._refreshed < max_age
        is_cut = self.copies_all and any(host.is_cut for host in self.hosts)
        if self._stopped or (is_recent and not is_cut):
            return
        may_write = self._may_write()
        with private_files():
            self._refresh_hosts(may_write)
            if may_write and self.hosts[0].time_left:
                self._copy_result()
        self._give_up_lock()
        self._refreshed = time.monotonic()

    def catch_up(self) -> list[str]:
        """Copy what hosts wrote; say which of them could not be reached."""
        self.refresh()
        problems = [f"{problem}; its logs here are incomplete" for problem in self.unreachable()]
        return problems + [
            f"{host.route.name}: {host.incomplete}" for host in self.hosts if host.incomplete
        ]

    def want_all(self, max_size: int | None = None) -> None:
        """Let every refresh copy all logs, however long it takes; at most this many bytes."""
        self.copies_all = True
        if max_size is not None:
            self.max_size = max_size

    @property
    def max_size(self) -> int:
        """How many bytes of the logs of each node are copied."""
        return self._max_size

    @max_size.setter
    def max_size(self, size: int) -> None:
        self._max_size = size
        for host in self.hosts:
            # A host that shares its files has the logs of all nodes.
            host.max_size = size * (self.record.nodes if host.has_all_files else 1)

    def checkpoints(self) -> tuple[str, list[str]]:
        """Return the output folder, and the names in it on the first host."""
        return self.plan.output_dir, self.hosts[0].list_names(self.plan.output_dir)

    def _refresh_hosts(self, may_write: bool) -> None:
        """Ask all hosts at the same time: one that is silent must not use up the time of others."""
        first_is_done = threading.Event()

        def refresh(host: HostSync) -> None:
            is_first = host is self.hosts[0]
            try:
                host.update_status()
                if not is_first:
                    # The first host alone can tell which attempts there are.
                    first_is_done.wait()
                if may_write and host.time_left and self._has_files(host):
                    self._copy_new(host)
            finally:
                if is_first:
                    first_is_done.set()

        # A thread for each: most of them wait for the first host.
        in_parallel(refresh, self.hosts, most=len(self.hosts))

    def _has_files(self, host: HostSync) -> bool:
        """Whether files of the job are copied from this host now."""
        # A folder of the same name may belong to another job, whose logs are not of this one.
        has_any = host in self.with_files and host.has_job
        # Once the job has ended, nothing else is to be done.
        return has_any and (not self.only_asks or bool((self.hosts[0].status or {}).get("result")))

    def _copy_new(self, host: HostSync) -> None:
        host.copy_new(self._copy_limit(host))

    def _copy_limit(self, host: HostSync) -> Deadline:
        return Deadline(math.inf if self.copies_all else min(host.route.patience, host.time_left))

    def final_result(self) -> Result | None:
        """Copy all that an ended job wrote, and return its result; raise HostError if lost."""
        folder = RunFolder(self.record.local_dir)
        if not folder.result() and self._may_write():
            with private_files():
                self._copy_new(self.hosts[0])
                self._copy_result()
            if not self._stopped:
                self._give_up_lock()
        # Another gptctl process may be the one that writes the copies.
        return folder.result() or self.hosts[0].read_result()

    def _copy_result(self) -> None:
        """Copy the result last: whoever sees it here may rely on all files written before it."""
        head, folder = self.hosts[0], RunFolder(self.record.local_dir)
        if not head.has_result or is_copied(self.record):
            return
        sources = [host for host in self.with_files if host.has_job]
        results = in_parallel(self._copy_new, sources[:1])
        results += in_parallel(self._copy_new, sources[1:])
        # The job has ended, but these logs are incomplete until the hosts can be reached again.
        missing = [
            host.route.name
            for host, result in zip(sources, results)
            if isinstance(result, Exception) or host.incomplete
        ]
        if missing:
            with replacing(folder.not_copied_file) as stream:
                stream.write("\n".join(missing).encode())
        else:
            folder.not_copied_file.unlink(missing_ok=True)
        if not folder.result():
            deadline = self._copy_limit(head)
            with suppress(HostError, OutOfTime):
                # Whoever sees the result must also see where the job may still be running.
                left = (head.read_result(deadline) or Result("")).not_ended or ()
                folder.set_not_ended(host.route.name for host in self.hosts if host.node in left)
                head.copy_result(deadline)

    @contextmanager
    def keep_updated(self) -> Iterator[None]:
        """Copy new log lines in the background while a job is followed."""
        self.copies_all = True
        self.refresh()
        for host in self.hosts:
            host.keep_trying()
        self._stopped = stopped = threading.Event()
        # A thread for each host: one that is unreachable must not delay the others.
        self._followers = [
            threading.Thread(target=self._follow, args=(host, stopped), daemon=True)
            for host in self.hosts
        ]
        with private_files():
            for follower in self._followers:
                follower.start()
            try:
                yield
            finally:
                stopped.set()
                self._stopped = None
                self._give_up_lock()

    def await_hosts(self) -> None:
        """Wait for one more try of the followers to reach hosts that are unreachable."""
        deadline = Deadline(LAST_TRY)
        while deadline.left and any(host.unreachable_reason for host in self.hosts):
            time.sleep(COPY_EVERY)
        # What a host that has just come back wrote is copied in the same round.
        if deadline.left < LAST_TRY - COPY_EVERY:
            time.sleep(COPY_EVERY)

    def _follow(self, host: HostSync, stopped: threading.Event) -> None:
        updated = float("-inf")
        while not stopped.is_set():
            try:
                if time.monotonic() - updated > STATUS_EVERY:
                    host.update_status()
                    updated = time.monotonic()
                if self._may_write() and self._has_files(host):
                    host.copy_new()
                if self._may_write() and host.node == 0:
                    self._copy_result()
            # The connection, the disk here, an invalid answer: the next round tries again.
            except Exception as error:
                host.unreachable_reason = getattr(error, "detail", "") or str(error) or repr(error)
            stopped.wait(COPY_EVERY)

    def _may_write(self) -> bool:
        """Whether this process writes the copies; take the lock if it is free."""
        # Two writers would append the same lines twice. The kernel frees the lock of a process
        # that was killed.
        if self._lock is None:
            file = self.record.run_folder / ".sync"
            try:
                lock = open_at_once(str(file), os.O_RDWR | os.O_CREAT)
            except OSError:  # something else has this name
                return False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def _give_up_lock(self) -> None:
        """Release the lock, unless a follower is still writing: another process would interfere."""
        deadline = time.monotonic() + COPY_EVERY
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                return
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def not_ended(self) -> list[str]:
        """The hosts that did not answer that nothing of the job is running there."""
        return [host.route.name for host in self.hosts if not host.has_ended()]

    def unreachable(self) -> list[str]:
        """Describe each host that did not answer: since when, and why."""
        # The times are kept in the folder, so that the next gptctl process knows them, too.
        file = self.record.run_folder / "reach.json"
        last = read_json(file) or {}
        now = time.time()
        last |= {host.route.name: now for host in self.hosts if not host.unreachable_reason}
        with suppress(OSError), private_files(), replacing(file) as stream:
            stream.write(json.dumps(last).encode())
        faults = {
            host.route.name: host.unreachable_reason
            for host in self.hosts
            if host.unreachable_reason
        }
        seen = {name: last.get(name) for name in faults}
        since = {
            name: clock_time(moment if is_time(moment) else self.record.created)
            for name, moment in seen.items()
        }
        return [
            f"{name}: {fault}"
            if fault == NOT_ASKED
            else f"{name} has been unreachable since {since[name]}: {fault}"
            for name, fault in faults.items()
        ]


def _plan_in(folder: Path) -> LaunchPlan:
    try:
        plan = read_plan(folder)
        # A plan of another job would point to another folder on the hosts.
        if plan.job_id != folder.name:
            raise DamagedFile("it is the plan of another job")
        return plan
    except DamagedFile as error:
        message = f"{folder}/plan.json is missing or damaged: {error}"
        raise UserError(message, "check the job on its hosts with ssh", OUT_OF_REACH) from None
