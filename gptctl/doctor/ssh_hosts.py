"""Run the doctor's scripts on ssh hosts: a folder on each, one command, and a copy of its files."""

from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptctl.doctor.node_rows import Arrival, clock_row
from gptctl.doctor.rows import Row, ok, wrong
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.remote.archive import pack
from gptctl.remote.connection import Connection, JumpHosts
from gptctl.remote.host_error import HostError
from gptctl.remote.parallel import in_parallel
from gptctl.remote.route import Route
from gptctl.remote.scripts import remote_command
from gptctl.spec.cluster import Cluster
from trainer.errors import UserError

CREATE_TIMEOUT = 60.0  # seconds: a host may wait until it sees a folder that another one created
TIMEOUT = 120  # seconds for the facts of a host, and for the all-reduce
REPLY_TIME = 20  # seconds more, for the files to get here
MAX_FILE_SIZE = 1 << 20  # bytes; larger files of a host are ignored


class DoctorHosts:
    """The hosts that can be reached, by node number."""

    def __init__(self, cluster: Cluster, routes: Sequence[Route]) -> None:
        self.cluster, self.routes = cluster, routes
        self.connections: dict[int, Connection] = {}
        self._created: dict[int, list[str]] = {}  # parents of the doctor's folder, by node

    def connect(self) -> list[Row]:
        jump_hosts = JumpHosts()
        results = in_parallel(lambda route: Connection(route, jump_hosts), self.routes)
        return [self._connection_row(number, result) for number, result in enumerate(results)]

    def _connection_row(self, number: int, result: Connection | Exception) -> Row:
        route = self.routes[number]
        if isinstance(result, Connection):
            self.connections[number] = result
            jumps = ", ".join(jump.name for jump in route.jumps)
            through = f" through {jumps}" if jumps else ""
            address = f"{route.user}@{route.host}:{route.port}{through}"
            return ok("ssh", f"{address}: authenticated, host key matches", route.name)
        if isinstance(result, UserError):
            found = result.detail if isinstance(result, HostError) else result.message
            return wrong("ssh", found, result.hint or "try to connect with ssh -v", route.name)
        raise result

    def head_address(self) -> str:
        """The address of the first host, for the others."""
        own = self.cluster.hosts[0].address
        if own or 0 not in self.connections:
            return own or self.routes[0].host
        # The third word is the address that sshd was reached at, whatever the host is called here.
        done = self.connections[0].run(["sh", "-c", 'echo "$SSH_CONNECTION"'])
        words = done.out.decode(errors="replace").split()
        return words[2] if len(words) > 2 else self.routes[0].host

    def clock_rows(self) -> list[Row]:
        def row(connection: Connection, number: int) -> Row:
            before = time.time()
            clock = float(connection.run(["date", "+%s.%N"]).out)
            arrival = Arrival(before, before, time.time())
            return clock_row(self.routes[number].name, clock, arrival)

        return [row for _, row in self._on_each(row) if isinstance(row, Row)]

    def create_folders(self, run_dir: str, folder: Path) -> list[Row]:
        """Copy the doctor's folder to the hosts; those where that fails are not used further."""
        archive = pack(folder)
        rows = []

        def create(connection: Connection, number: int) -> Any:
            # On a shared file system the first host creates it, and the others wait for it.
            is_shared = self.cluster.shared_fs and number > 0
            command = remote_command("doctor_create.sh", run_dir, "shared" if is_shared else "")
            sent = b"" if is_shared else archive
            return connection.run(command, sent, CREATE_TIMEOUT)

        for number, done in self._on_each(create):
            if isinstance(done, UserError) or done.code:
                rows.append(self._folder_row(number, done))
                self.connections.pop(number).close()
            else:
                self._created[number] = done.out.decode(errors="replace").splitlines()
        return rows

    def _folder_row(self, number: int, done: Any) -> Row:
        name = self.routes[number].name
        if isinstance(done, UserError):
            return wrong("run_root", done.message, done.hint or "check it on the host", name)
        found = done.err.splitlines()[0] if done.err else f"exit code {done.code}"
        fix = "choose a folder that you can write to on every host"
        if "File exists" in found:  # the name is random: only another host can have created it
            found = f"{self.cluster.run_root} is shared by several hosts"
            fix = "set shared_fs: true in the profile"
        return wrong("run_root", found, fix, name)

    def run_scripts(self, action: str, plan: LaunchPlan, folder: Path, **variables: str) -> None:
        """Run the script on all hosts at the same time, and copy the files that it writes."""

        def run(connection: Connection, number: int) -> Any:
            environment = {**variables, "GPTCTL_NODE": str(number)}
            assignments = [f"{name}={value}" for name, value in environment.items()]
            command = remote_command("doctor_run.sh", plan.remote_dir, str(TIMEOUT), action)
            return connection.run(["env", *assignments, *command], timeout=TIMEOUT + REPLY_TIME)

        for number, done in self._on_each(run):
            if not isinstance(done, UserError):  # a host without facts gets a row of its own
                unpack(done.out, folder, files_of(number))

    def remove_folders(self, run_dir: str) -> None:
        """Remove the folders and their processes, and close the connections."""

        def remove(connection: Connection, number: int) -> Any:
            created = self._created.get(number, [])
            return connection.run(remote_command("doctor_remove.sh", run_dir, *created))

        self._on_each(remove)
        for connection in self.connections.values():
            connection.close()

    def _on_each(self, work: Any) -> list[tuple[int, Any]]:
        """The result or the exception of each host, by node number."""
        numbers = list(self.connections)
        results = in_parallel(lambda number: work(self.connections[number], number), numbers)
        return list(zip(numbers, results))


def files_of(number: int) -> re.Pattern[str]:
    """The names of files that this node may write; the first one runs rank 0, which measures."""
    own = rf"node\.{number}\.[a-z0-9.]{{1,60}}"
    return re.compile(own if number else rf"{own}|reduce\.json")


def unpack(archive: bytes, folder: Path, accepted: re.Pattern[str]) -> None:
    """Write the small plain files of an archive that have accepted names to a folder."""
    try:
        # Never compressed: a few bytes could become gigabytes.
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as entries:
            for entry in entries:
                # A host is not trusted to choose where it writes here, nor how much.
                is_file = entry.isreg() and entry.size <= MAX_FILE_SIZE
                is_accepted = is_file and accepted.fullmatch(entry.name)
                content = entries.extractfile(entry) if is_accepted else None
                if content:
                    (folder / entry.name).write_bytes(content.read())
    # The others: numbers in its headers that are none, or too large.
    except (tarfile.TarError, ValueError, OverflowError):
        return
