"""Reaches the nodes of an ssh cluster: a folder on every host, one command there, and what it wrote brought here."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gptctl.backends.ssh.launcher import pack
from gptctl.doctor.judge import Sighting, judge_clock
from gptctl.doctor.rows import Row, ok, wrong
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.remote.connection import Connection, JumpHosts, Route, in_parallel
from gptctl.remote.host_error import HostError
from gptctl.remote.scripts import remote_command
from gptctl.spec.cluster import Cluster
from trainer.errors import UserError

PATIENCE = 120  # seconds for the facts of a host, and for the all-reduce
LARGEST = 1 << 20  # of a file that a host sends


class Hosts:
    """The hosts that can be reached, by the number of their node."""

    def __init__(self, cluster: Cluster, routes: Sequence[Route]) -> None:
        self.cluster, self.routes = cluster, routes
        self.open: dict[int, Connection] = {}
        self._made: dict[int, list[str]] = {}  # folders above the own one

    def connect(self) -> list[Row]:
        rows = []
        jump_hosts = JumpHosts()

        def connect(route: Route) -> Connection:
            return Connection(route, jump_hosts)

        for number, result in enumerate(in_parallel(connect, self.routes)):
            route = self.routes[number]
            if isinstance(result, Connection):
                self.open[number] = result
                through = (
                    f" through {', '.join(jump.name for jump in route.jumps)}"
                    if route.jumps
                    else ""
                )
                place = f"{route.user}@{route.host}:{route.port}"
                rows.append(
                    ok(
                        "ssh",
                        f"{place}{through}: authenticated, its host key is the pinned one",
                        route.name,
                    )
                )
            elif isinstance(result, UserError):
                what = result.what if isinstance(result, HostError) else result.message
                rows.append(wrong("ssh", what, result.hint or "try it with ssh -v", route.name))
            else:
                raise result
        return rows

    def address(self) -> str:
        """Of the first host, for the others."""
        own = self.cluster.hosts[0].address
        if own or 0 not in self.open:
            return own or self.routes[0].host
        said = (
            self.open[0]
            .run(["sh", "-c", 'echo "$SSH_CONNECTION"'])
            .out.decode(errors="replace")
            .split()
        )
        return said[2] if len(said) > 2 else self.routes[0].host

    def clocks(self) -> list[Row]:
        """Each asked for the time, between two looks at the clock here."""

        def ask(connection: Connection, number: int) -> Row:
            before = time.time()
            said = float(connection.run(["date", "+%s.%N"]).out)
            return judge_clock(
                self.routes[number].name, said, Sighting(before, before, time.time())
            )

        return [row for _, row in self._each(ask) if isinstance(row, Row)]

    def make(self, run_dir: str, folder: Path) -> list[Row]:
        archive = pack(folder)
        rows = []

        def run(connection: Connection, number: int) -> Any:
            is_made = self.cluster.shared_fs and number > 0
            return connection.run(
                remote_command("doctor_create.sh", run_dir, "there" if is_made else ""),
                b"" if is_made else archive,
            )

        for number, done in self._each(run):
            name = self.routes[number].name
            if isinstance(done, UserError):
                rows.append(wrong("run_root", done.message, done.hint or "look at it there", name))
            elif done.code:
                words = done.err.splitlines()[0] if done.err else f"exit code {done.code}"
                if "File exists" in words:
                    words = f"{self.cluster.run_root} is one folder that hosts share: set shared_fs: true"
                rows.append(
                    wrong(
                        "run_root",
                        words,
                        "choose a folder that you may write to on every host",
                        name,
                    )
                )
            else:
                self._made[number] = done.out.decode(errors="replace").splitlines()
                continue
            self.open.pop(number).close()
        return rows

    def act(self, what: str, plan: LaunchPlan, folder: Path, **variables: str) -> None:
        """Has every host run its script at the same time, and takes over what each has written."""

        def run(connection: Connection, number: int) -> Any:
            own = [
                f"{name}={value}"
                for name, value in {**variables, "GPTCTL_NODE": str(number)}.items()
            ]
            return connection.run(
                [
                    "env",
                    *own,
                    *remote_command("doctor_run.sh", plan.remote_dir, str(PATIENCE), what),
                ],
                patience=PATIENCE + 20,
            )

        for _, done in self._each(run):
            if not isinstance(done, UserError):
                unpack(done.out, folder)

    def remove(self, run_dir: str) -> None:
        self._each(
            lambda connection, number: connection.run(
                remote_command("doctor_remove.sh", run_dir, *self._made.get(number, []))
            )
        )
        for connection in self.open.values():
            connection.close()

    def _each(self, work: Any) -> list[tuple[int, Any]]:
        numbers = list(self.open)
        return list(
            zip(numbers, in_parallel(lambda number: work(self.open[number], number), numbers))
        )


def unpack(archive: bytes, folder: Path) -> None:
    """Plain small files by their bare names, whatever else a host may send."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as entries:
            for entry in entries:
                is_plain = (
                    entry.isreg()
                    and PurePosixPath(entry.name).name == entry.name
                    and entry.size <= LARGEST
                )
                content = entries.extractfile(entry) if is_plain else None
                if content:
                    (folder / entry.name).write_bytes(content.read())
    except tarfile.TarError:
        return
