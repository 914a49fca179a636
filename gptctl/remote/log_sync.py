"""The folder of an ssh job on this machine: what its hosts have written so far, brought here over SFTP.

Logs only grow, so each is read on from where its copy ends; everything else is small and copied whole. Since node and
rank are in their names, the files of all hosts fit into one folder, in which the rest of gptctl reads as in any other.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder, read_json
from gptctl.jobs.store import JobRecord
from gptctl.remote.connection import (
    CommandResult,
    Connection,
    Files,
    JumpHosts,
    Route,
    host_errors,
    in_parallel,
    routes,
)
from gptctl.remote.host_error import HostError
from gptctl.remote.scripts import remote_command
from gptctl.spec.cluster import cluster_of_job
from trainer.errors import OUT_OF_REACH, UserError

CHUNK = 1 << 20
FRESH = 3.0  # seconds for which an answer counts
BRING_EVERY = 0.5  # seconds between two looks at the files of a job that is followed
LOOK_EVERY = 5.0  # seconds between two looks at its processes
AGAIN = (1.0, 15.0)  # seconds until a lost host is tried again: at first, at most
LARGEST = 1 << 20  # of what is copied whole
MOST_AHEAD = 1 << 30  # bytes that are asked for before the first of them has come
IS_GONE = 66
RESULT = "result.json"
_ATTEMPT = re.compile(r"attempt-(0|[1-9]\d{0,5})", re.ASCII)
GROWS = re.compile(
    r"workerlog\.\d{1,7}|node\.\d{1,7}\.log|ranks\.\d{1,7}\.jsonl|metrics\.jsonl", re.ASCII
)
_WHOLE = re.compile(
    r"endpoint\.json|hosts|cannot-be-helped|node\.\d{1,7}\.(exit|pid)|status\.json", re.ASCII
)


class Part(NamedTuple):
    """A file on a host, and its copy."""

    remote: str
    local: Path
    size: int
    changed: int


class HostSync:
    """One host of a job: its files, and what it says of its processes."""

    def __init__(
        self,
        record: JobRecord,
        plan: LaunchPlan,
        route: Route,
        node: int,
        jump_hosts: JumpHosts,
    ) -> None:
        self.record, self.plan, self.route, self.node = record, plan, route, node
        self._jump_hosts = jump_hosts
        self.fault = "it was not asked yet"  # why it is out of reach
        self.seen: dict[str, Any] | None = None  # what it said last; None: its folder is gone
        self.has_result = False
        self._connection: Connection | None = None
        self._refusal: HostError | None = None  # of the last try to connect, if it failed
        self._pause, self._try_at = 0.0, 0.0  # after it
        self._copying = threading.Lock()

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """An open connection; when it is lost, the host is out of reach until the next one."""
        try:
            self._connection = self._connection or self._connect()
            with host_errors(self.route):
                yield self._connection
            self.fault = ""
        except HostError as error:
            self.close()
            self.fault = error.what
            raise

    def _connect(self) -> Connection:
        """A host that did not let us in is left alone for a while: everything that asks it would wait again."""
        began = time.monotonic()
        if self._refusal and began < self._try_at:
            raise self._refusal
        try:
            connection = Connection(self.route, self._jump_hosts)
            self._refusal, self._pause = None, 0.0
            return connection
        except HostError as error:
            now = time.monotonic()
            self._pause = min(AGAIN[1], max(AGAIN[0], 2 * self._pause, 2 * (now - began)))
            self._refusal, self._try_at = error, now + self._pause
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            connection.close()

    def ask(self, *words: str, patience: float = 60.0) -> dict[str, Any] | None:
        """Has `host_commands` answer; None when there is nothing of the job on that host."""
        with self.connected() as connection:
            command = remote_command("ask_host.sh", self.plan.remote_dir, self.record.token, *words)
            done = connection.run(command, patience=patience)
            if done.code == IS_GONE:
                return None
            return self._answer(done)

    def _answer(self, done: CommandResult) -> dict[str, Any]:
        with suppress(ValueError):
            answer = json.loads(done.out)
            if isinstance(answer, dict):
                return answer
        said = done.err.splitlines()[-1] if done.err else f"exit code {done.code}"
        raise HostError(self.route.name, f"it cannot look after its job: {said}")

    def look(self) -> None:
        self.seen = self.ask("look")

    def names_in(self, folder: str) -> list[str]:
        with self.connected() as connection:
            return [entry.name for entry in connection.listed(folder)]

    def copy_new(self) -> None:
        """Copies what is new."""
        with self._copying, self.connected() as connection:
            for part in self._parts(connection):
                copy = _append if GROWS.fullmatch(part.local.name) else _replace
                with suppress(FileNotFoundError):  # it has gone since it was listed
                    copy(connection.files, part)

    def _parts(self, connection: Connection) -> Iterator[Part]:
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
        has_first_rank = (
            self.node == 0 or self.plan.form == "c10d"
        )  # which sorts the hosts in its own route
        if self.plan.output_dir and has_first_rank:
            yield from _parts_of(connection, self.plan.output_dir, Path(self.record.output_dir))

    def copy_result(self) -> None:
        """The last word of the job, which only the first host has."""
        with self._copying, self.connected() as connection:
            remote = f"{self.plan.remote_dir}/{RESULT}"
            found = connection.files.stat(remote)
            part = Part(
                remote, self.record.run_folder / RESULT, found.st_size or 0, found.st_mtime or 0
            )
            _replace(connection.files, part)

    def wait_for_next_try(self) -> None:
        time.sleep(max(0.0, self._try_at - time.monotonic()))


def _parts_of(connection: Connection, remote: str, local: Path) -> Iterator[Part]:
    for entry in connection.listed(remote):
        if is_synced(entry.name) and stat.S_ISREG(entry.mode):
            yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)


def is_synced(name: str) -> bool:
    return bool(GROWS.fullmatch(name) or _WHOLE.fullmatch(name))


def _append(files: Files, part: Part) -> None:
    """Reads on from where the copy ends; a file that has become shorter is another one."""
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with open(part.local, "ab") as copy:
        if copy.tell() > part.size:
            copy.truncate(0)
        at = os.fstat(copy.fileno()).st_size
        if at == part.size and at:
            return
        with files.open(part.remote, "rb") as source:
            source.seek(at)
            source.prefetch(min(part.size, MOST_AHEAD))
            while at < part.size and (data := source.read(min(CHUNK, part.size - at))):
                copy.write(data)
                at += len(data)


def _replace(files: Files, part: Part) -> None:
    with suppress(FileNotFoundError):
        found = part.local.stat()
        if (found.st_size, int(found.st_mtime)) == (part.size, part.changed):
            return
    part.local.parent.mkdir(parents=True, exist_ok=True)
    with files.open(part.remote, "rb") as source:
        data = source.read(LARGEST)
    with replacing(part.local) as copy:
        copy.write(data)
    os.utime(part.local, (part.changed, part.changed))


class LogSync:
    """All hosts of a job. Of several gptctl that look at the same job, one writes its copy here, and all read it."""

    def __init__(self, record: JobRecord, jump_hosts: JumpHosts) -> None:
        self.record = record
        self.plan = _plan_in(record.run_folder)
        cluster = cluster_of_job(record.run_folder)
        used = routes(cluster)[: record.nodes]
        self.hosts = [
            HostSync(record, self.plan, route, node, jump_hosts) for node, route in enumerate(used)
        ]
        self.with_files = self.hosts[:1] if cluster.shared_fs else self.hosts
        self._refreshed = float("-inf")
        self._stopped: threading.Event | None = None  # while it is kept fresh
        self._followers: list[threading.Thread] = []
        self._lock: int | None = None

    def refresh(self, oldest: float = FRESH) -> None:
        """What the hosts have and say now, unless that was asked a moment ago or is kept fresh anyway."""
        if self._stopped or time.monotonic() - self._refreshed < oldest:
            return
        may_write = self._may_write()
        with private_files():
            in_parallel(lambda host: self._refresh_host(host, may_write), self.hosts)
            if may_write:
                self._copy_result()
        self._give_up_lock()
        self._refreshed = time.monotonic()

    def _refresh_host(self, host: HostSync, may_write: bool) -> None:
        host.look()
        if may_write and host in self.with_files:
            host.copy_new()

    def _copy_result(self) -> None:
        """After everything that was written before it."""
        head, folder = self.hosts[0], RunFolder(self.record.local_dir)
        if not head.has_result or (folder.result() and not folder.not_copied.exists()):
            return
        results = in_parallel(HostSync.copy_new, self.with_files)
        missing = [
            host.route.name
            for host, result in zip(self.with_files, results)
            if isinstance(result, Exception)
        ]
        if missing:
            folder.not_copied.write_text("\n".join(missing), encoding="utf-8")
        else:
            folder.not_copied.unlink(missing_ok=True)
        if not folder.result():
            with suppress(HostError):
                head.copy_result()

    @contextmanager
    def keep_updated(self) -> Iterator[None]:
        """While a job is followed. Every host is read by a thread of its own: one that is lost holds up no other."""
        self.refresh()
        self._stopped = stopped = threading.Event()
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
        looked = float("-inf")
        while not stopped.is_set():
            try:
                if time.monotonic() - looked > LOOK_EVERY:
                    host.look()
                    looked = time.monotonic()
                if self._may_write() and host in self.with_files:
                    host.copy_new()
                if self._may_write() and host.node == 0:
                    self._copy_result()
            except (
                Exception
            ) as error:  # the route to it, the disk here, nonsense that it sent: it is tried again
                host.fault = getattr(error, "what", "") or str(error) or repr(error)
            stopped.wait(BRING_EVERY)

    def _may_write(self) -> bool:
        """Whether this process is the one that writes the copy; the lock goes with the process that has it."""
        if self._lock is None:
            lock = os.open(
                self.record.run_folder / ".sync", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def _give_up_lock(self) -> None:
        """Not while something is still being written: another process would write the same."""
        deadline = time.monotonic() + BRING_EVERY
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                return
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def unreachable(self) -> list[str]:
        """In words, which hosts are, since when, and why; when each was last seen is kept in the folder."""
        file = self.record.run_folder / "reach.json"
        last = read_json(file) or {}
        now = time.time()
        last |= {host.route.name: now for host in self.hosts if not host.fault}
        with suppress(OSError), private_files(), replacing(file) as stream:
            stream.write(json.dumps(last).encode())
        away = {host.route.name: host.fault for host in self.hosts if host.fault}
        since = {name: _clock(last.get(name, self.record.created)) for name in away}
        return [
            f"{name} is out of reach since {since[name]}: {fault}" for name, fault in away.items()
        ]


def _plan_in(folder: Path) -> LaunchPlan:
    try:
        plan = LaunchPlan.from_json(read_json(folder / "plan.json") or {})
        if plan.job_id != folder.name or not isinstance(plan.remote_dir, str):
            raise KeyError
        return plan
    except KeyError:
        raise UserError(
            f"{folder}/plan.json is gone or damaged", "look at the job on its hosts", OUT_OF_REACH
        ) from None


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
