"""Keep the folder of an ssh job on this machine up to date with its hosts, over SFTP.

Logs only grow, so each copy is continued from its end; other files are small and copied whole.
File names contain node or rank, so the files of all hosts fit into one folder, which the rest of
gptctl reads like that of any other job.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.contract import (
    ATTEMPT_NAME,
    NO_SUCH_JOB,
    OUTCOME,
    RESULT,
    STILL_RUNNING,
    UNRECOVERABLE_FILE,
)
from gptctl.engine.file_reading import read_json
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.messages import parse_message
from gptctl.engine.run_folder import Result, RunFolder, parse_result
from gptctl.jobs.store import JobRecord
from gptctl.remote.answers import is_answer
from gptctl.remote.connection import CommandResult, Files
from gptctl.remote.copy_files import Part, copy_rest, is_up_to_date, resume
from gptctl.remote.host_error import HostError
from gptctl.remote.link import HostLink, LinkConnection
from gptctl.remote.parallel import in_parallel
from gptctl.remote.scripts import remote_command
from gptctl.text import clock_time
from trainer.errors import OUT_OF_REACH, UserError

MAX_AGE = 3.0  # seconds for which the last answer of the hosts is used
COPY_EVERY = 0.5  # seconds between two copies of new log lines while a job is followed
STATUS_EVERY = 5.0  # seconds between two queries of its processes
REMOVE_TIMEOUT = 600.0  # seconds: a folder may hold many checkpoints
MAX_WHOLE = 1 << 20  # bytes of a file that is copied whole
BATCH_LOG = "batch.log"
MAX_PROBLEM = 200  # characters of a host's error message
_ATTEMPT = re.compile(ATTEMPT_NAME)
# Names come from other machines: only these are accepted, and none can leave the folder.
GROWS = re.compile(
    r"workerlog\.\d{1,7}|node\.\d{1,7}\.log|ranks\.\d{1,7}\.jsonl|metrics\.jsonl|batch\.log",
    re.ASCII,
)
_WHOLE = re.compile(
    rf"endpoint\.json|hosts|{UNRECOVERABLE_FILE}|{OUTCOME}|node\.\d{{1,7}}\.(exit|pid)"
    r"|status\.json",
    re.ASCII,
)


def is_copied(record: JobRecord) -> bool:
    """Whether everything that an ended job wrote is here: no host was unreachable."""
    folder = RunFolder(record.local_dir)
    return folder.result() is not None and not folder.not_copied_file.exists()


class HostSync:
    """One host of a job: its files, and the state of its processes."""

    def __init__(
        self,
        record: JobRecord,
        plan: LaunchPlan,
        link: HostLink,
        node: int,
        has_agent: bool = True,
    ) -> None:
        self.record, self.plan, self.node, self.route = record, plan, node, link.route
        self._link, self._has_agent = link, has_agent
        self.unreachable_reason = "not contacted yet"  # why it is unreachable
        self.status: dict[str, Any] | None = None  # its last answer; None: its folder is missing
        self.has_result = False
        self._copying = link.copying

    @contextmanager
    def connected(self) -> Iterator[LinkConnection]:
        try:
            with self._link.connected() as connection:
                yield connection
            self.unreachable_reason = ""
        except HostError as error:
            self.unreachable_reason = error.detail
            raise

    def ask(self, *command: str, timeout: float = 60.0) -> dict[str, Any] | None:
        """Run a command of `host_commands`; return None if nothing of the job is on the host."""
        with self.connected() as connection:
            # The token makes sure that the folder belongs to this job, not to one of the same id.
            words = (self.plan.remote_dir, self.record.token, *command)
            done = connection.run(remote_command("ask_host.sh", *words), timeout=timeout)
            if done.code == NO_SUCH_JOB:
                return None
            return self._answer(command[0], done)

    def _answer(self, command: str, done: CommandResult) -> dict[str, Any]:
        answer = parse_message(done.out)
        if answer is not None and is_answer(command, answer):
            return answer
        if not done.code:
            raise HostError(self.route.name, f"invalid answer to `{command}`")
        problem = done.last_error
        raise HostError(self.route.name, f"its agent script failed: {problem[:MAX_PROBLEM]}")

    def remove_folder(self) -> None:
        """Remove the job's folder on this host, unless it is already missing."""
        with self.connected() as connection:
            words = (self.plan.remote_dir, self.record.token)
            done = connection.run(remote_command("remove_job.sh", *words), timeout=REMOVE_TIMEOUT)
        if done.code == STILL_RUNNING:
            raise HostError(self.route.name, "processes of the job are running there")
        if done.code not in (0, NO_SUCH_JOB):
            problem = done.last_error
            raise HostError(self.route.name, problem[:MAX_PROBLEM])

    def update_status(self) -> None:
        if self._has_agent:
            self.status = self.ask("status")
            return
        # A scheduler knows the state of its jobs: only check that the host can be reached.
        with self.connected():
            return

    def list_names(self, folder: str) -> list[str]:
        with self._copying, self.connected() as connection:
            return [entry.name for entry in connection.listed(folder)]

    def copy_new(self) -> None:
        """Copy everything that the host has written since the last call."""
        # Only one thread at a time may append to a copy.
        with self._copying, self.connected() as connection:
            for part in self._parts(connection):
                copy = _append if self._grows(part.local) else _replace
                # It may have been removed since it was listed.
                with suppress(FileNotFoundError):
                    copy(connection.files, part)

    def _grows(self, file: Path) -> bool:
        # Slurm's log is moved to the folder of the next attempt, and then there may be a new one.
        return bool(GROWS.fullmatch(file.name)) and file != self._batch_log

    @property
    def _batch_log(self) -> Path:
        return Path(self.record.log_dir, BATCH_LOG)

    def _parts(self, connection: LinkConnection) -> Iterator[Part]:
        for remote, local in (
            (self.plan.remote_dir, self.record.local_dir),
            (self.plan.log_dir, self.record.log_dir),
        ):
            for entry in connection.listed(remote):
                if _ATTEMPT.fullmatch(entry.name):
                    yield from _parts_of(
                        connection, f"{remote}/{entry.name}", Path(local, entry.name)
                    )
                self.has_result |= entry.name == RESULT
                if entry.name == BATCH_LOG and stat.S_ISREG(entry.mode):
                    changed = (entry.size, entry.changed)
                    yield Part(f"{remote}/{BATCH_LOG}", self._batch_log, *changed)
        # With c10d, torchrun itself numbers the nodes: rank 0 may be on any host.
        has_first_rank = self.node == 0 or self.plan.form == "c10d"
        if self.plan.output_dir and has_first_rank:
            yield from _parts_of(connection, self.plan.output_dir, Path(self.record.output_dir))

    def copy_result(self) -> None:
        """Copy the result of the job, which only the first host has."""
        with self._copying, self.connected() as connection:
            remote, local = f"{self.plan.remote_dir}/{RESULT}", self.record.run_folder / RESULT
            found = connection.files.stat(remote)
            part = Part(remote, local, found.st_size or 0, found.st_mtime or 0)
            _replace(connection.files, part)

    def read_result(self) -> Result | None:
        """Read the result of the job on the first host, without copying it."""
        with self._copying, self.connected() as connection:
            try:
                with connection.files.open(f"{self.plan.remote_dir}/{RESULT}", "rb") as source:
                    return parse_result(parse_message(source.read(MAX_WHOLE)))
            except FileNotFoundError:
                return None

    def wait_for_next_try(self) -> None:
        self._link.wait_for_next_try()


def _parts_of(connection: LinkConnection, remote: str, local: Path) -> Iterator[Part]:
    for entry in connection.listed(remote):
        # No symbolic links: they could point to any file of the host.
        if is_synced(entry.name) and stat.S_ISREG(entry.mode):
            yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)


def is_synced(name: str) -> bool:
    return bool(GROWS.fullmatch(name) or _WHOLE.fullmatch(name))


def _append(files: Files, part: Part) -> None:
    """Continue the copy from its end."""
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with open(part.local, "ab") as copy:
        start = resume(copy, part.size)
        if start < part.size:
            with files.open(part.remote, "rb") as source:
                copy_rest(source, copy, start, part.size)


def _replace(files: Files, part: Part) -> None:
    """Copy the whole file, unless the copy is up to date."""
    if is_up_to_date(part):
        return
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with files.open(part.remote, "rb") as source:
        data = source.read(MAX_WHOLE)
    with replacing(part.local) as copy:
        copy.write(data)
    os.utime(part.local, (part.changed, part.changed))


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
        self.hosts = [
            HostSync(record, self.plan, link, node, has_agents) for node, link in enumerate(links)
        ]
        self.with_files = self.hosts[:1] if is_shared else self.hosts
        self._refreshed = float("-inf")
        self._stopped: threading.Event | None = None  # set while followers run
        self._followers: list[threading.Thread] = []
        self._lock: int | None = None

    def refresh(self, max_age: float = MAX_AGE) -> None:
        """Update status and files of all hosts, unless that was just done or followers do it."""
        if self._stopped or time.monotonic() - self._refreshed < max_age:
            return
        may_write = self._may_write()
        with private_files():
            in_parallel(lambda host: self._refresh_host(host, may_write), self.hosts)
            if may_write:
                self._copy_result()
        self._give_up_lock()
        self._refreshed = time.monotonic()

    def catch_up(self) -> list[str]:
        """Copy what hosts wrote; say which of them could not be reached."""
        self.refresh()
        return [f"{problem}; its logs here are incomplete" for problem in self.unreachable()]

    def checkpoints(self) -> tuple[str, list[str]]:
        """Return the output folder, and the names in it on the first host."""
        return self.plan.output_dir, self.hosts[0].list_names(self.plan.output_dir)

    def _refresh_host(self, host: HostSync, may_write: bool) -> None:
        host.update_status()
        if may_write and host in self.with_files:
            host.copy_new()

    def final_result(self) -> Result | None:
        """Copy all that an ended job wrote, and return its result; raise HostError if lost."""
        folder = RunFolder(self.record.local_dir)
        if not folder.result() and self._may_write():
            with private_files():
                self.hosts[0].copy_new()
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
        results = in_parallel(HostSync.copy_new, self.with_files)
        # The job has ended, but these logs are incomplete until the hosts can be reached again.
        missing = [
            host.route.name
            for host, result in zip(self.with_files, results)
            if isinstance(result, Exception)
        ]
        if missing:
            folder.not_copied_file.write_text("\n".join(missing), encoding="utf-8")
        else:
            folder.not_copied_file.unlink(missing_ok=True)
        if not folder.result():
            with suppress(HostError):
                head.copy_result()

    @contextmanager
    def keep_updated(self) -> Iterator[None]:
        """Copy new log lines in the background while a job is followed."""
        self.refresh()
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

    def _follow(self, host: HostSync, stopped: threading.Event) -> None:
        updated = float("-inf")
        while not stopped.is_set():
            try:
                if time.monotonic() - updated > STATUS_EVERY:
                    host.update_status()
                    updated = time.monotonic()
                if self._may_write() and host in self.with_files:
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
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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

    def unreachable(self) -> list[str]:
        """Describe each unreachable host: since when, and why."""
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
        since = {name: clock_time(last.get(name, self.record.created)) for name in faults}
        return [
            f"{name} has been unreachable since {since[name]}: {fault}"
            for name, fault in faults.items()
        ]


def _plan_in(folder: Path) -> LaunchPlan:
    try:
        plan = LaunchPlan.from_json(read_json(folder / "plan.json") or {})
        # A plan of another job would point to another folder on the hosts.
        if plan.job_id != folder.name or not isinstance(plan.remote_dir, str):
            raise KeyError
        return plan
    except KeyError:
        message = f"{folder}/plan.json is missing or damaged"
        raise UserError(message, "check the job on its hosts with ssh", OUT_OF_REACH) from None
