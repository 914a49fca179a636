"""Machines made of namespaces: each has its own name, network, processes and power switch. Knows nothing of Slurm.

One tree of unnamed namespaces: those of the head contain the bridges and all other machines, so that two labs with the
same addresses can run side by side, and killing one process stops everything.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.keeper import child_of

HERE = Path(__file__).resolve().parent
BRIDGES = {"10.77": "br0", "10.78": "br1"}  # the head has no address on the second: use the bastion
HEAD_ADDRESS = "10.77.0.1"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USERS = {"root": pwd.getpwuid(0).pw_dir, "gpt": "/home/gpt"}


class LabError(RuntimeError):
    """The lab itself failed, so the test has no result."""


def await_true(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"not within {seconds:g} s: {what}")
        time.sleep(0.03)


class Machine(NamedTuple):
    name: str
    kind: str  # head, node, ssh or laptop: see machine.sh
    addresses: tuple[str, ...]

    @property
    def links(self) -> dict[str, str]:
        """Addresses by the name of the network interface at the bridge."""
        return {f"{self.name}-{number}": address for number, address in enumerate(self.addresses)}


HEAD = Machine("head", "head", (HEAD_ADDRESS,))


def needed_folders() -> list[str]:
    """Folders that must stay visible when homes and /run are covered: interpreter, repository, temporary files."""
    found = {sys.prefix, sys.base_prefix, str(HERE.parents[1]), tempfile.gettempdir()}
    link = Path(sys.executable)
    while link.is_symlink():  # a virtual environment's interpreter may be a chain of links
        link = link.parent / os.readlink(link)
        found.add(os.path.normpath(link.parent))
    return sorted(found)


class Machines:
    """The tree of namespaces of one lab, and its folder, which is removed with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Machine] = {}
        self._pids: dict[str, int] = {}  # of each machine's pid 1, as this process sees it
        self._entries: dict[str, subprocess.Popen[str]] = {}  # the keeper and, per other machine, its nsenter
        self._dark: set[str] = set()

    # Power and cables

    def open(self) -> None:
        """Start the keeper only: from now on it will remove the folder."""
        (self.folder / "log").mkdir()
        keeper = [sys.executable, "-IS", str(HERE / "keeper.py"), str(self.folder)]
        self._begin(HEAD, [*keeper, *self._pid_1(HEAD, "--ipc")], stdin=subprocess.PIPE)

    def power_on_head(self) -> None:
        keeper = self._entries["head"]
        assert keeper.stdin
        print("go", file=keeper.stdin, flush=True)
        self._finish(HEAD)
        bridges = [f"link add {bridge} type bridge\nlink set {bridge} up" for bridge in BRIDGES.values()]
        self._ip("head", "link set lo up", *bridges, f"address add {HEAD_ADDRESS}/16 dev br0")

    def close(self) -> None:
        """Stop everything; return when no process, mount or folder is left."""
        keeper = self._entries["head"]
        assert keeper.stdin
        keeper.stdin.close()
        for entry in self._entries.values():
            entry.wait()

    def power_on(self, machines: Iterable[Machine]) -> None:
        machines = list(machines)
        for machine in machines:
            self._begin(machine, self.argv("head", *self._pid_1(machine)))
        for machine in machines:
            self._finish(machine)
            self._plug_in(machine)

    def crash(self, name: str) -> None:
        """Cut the power. The cable first: a kernel closes the connections of killed processes, a dead machine does not."""
        self._ip("head", *(f"link delete {link}" for link in self._other(name).links))
        os.kill(self._pids.pop(name), signal.SIGKILL)
        self._entries.pop(name).wait()
        self._dark.discard(name)

    def restart(self, name: str) -> None:
        self.power_on([self._known[name]])

    def cut(self, name: str) -> None:
        self._ip("head", *(f"link set {link} down" for link in self._other(name).links))
        self._dark.add(name)

    def restore(self, name: str) -> None:
        self._ip("head", *(f"link set {link} up" for link in self._other(name).links))
        self._dark.discard(name)

    @property
    def crashed(self) -> list[str]:
        return [name for name in self._known if name not in self._pids]

    @property
    def cut_off(self) -> list[str]:
        return sorted(self._dark)

    def _other(self, name: str) -> Machine:
        if name == "head":
            raise ValueError("the head holds the others: without it there is no lab")
        return self._known[name]

    def pid_1(self, name: str) -> int:
        """The pid of a machine's pid 1, as this process sees it."""
        return self._pids[name]

    def _pid_1(self, machine: Machine, *more: str) -> list[str]:
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", *more]
        script = [str(HERE / "machine.sh"), machine.name, machine.kind, str(self.folder), *needed_folders()]
        return ["unshare", *spaces, "--propagation", "private", "bash", *script]

    def _begin(self, machine: Machine, command: list[str], stdin: int = subprocess.DEVNULL) -> None:
        with (self.folder / "log" / f"{machine.name}.machine.log").open("a") as log:
            self._entries[machine.name] = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._known[machine.name] = machine

    def _finish(self, machine: Machine) -> None:
        entry = self._entries[machine.name]
        assert entry.stdout
        if entry.stdout.readline() != "ready\n":
            log = self.folder / "log" / f"{machine.name}.machine.log"
            raise LabError(f"{machine.name} did not start: {log.read_text()}")
        entry.stdout.close()
        self._pids[machine.name] = child_of(child_of(entry.pid))  # the keeper's or nsenter's unshare, its pid 1

    def _plug_in(self, machine: Machine) -> None:
        inside = ["link set lo up"]
        for number, (link, address) in enumerate(machine.links.items()):
            bridge = BRIDGES[".".join(address.split(".")[:2])]
            # The same after a restart: other machines keep using the hardware address they know.
            hardware = ":".join(f"{part:02x}" for part in (2, 0, *map(int, address.split("."))))
            peer = f"peer name eth{number} address {hardware} netns {self._pids[machine.name]}"
            self._ip("head", f"link add {link} type veth {peer}", f"link set {link} master {bridge} up")
            inside += [f"address add {address}/16 dev eth{number}", f"link set eth{number} up"]
        self._ip(machine.name, *inside)

    def _ip(self, name: str, *commands: str) -> None:
        # Enter only the network namespace: the pid in `netns PID` must be one of this pid namespace.
        enter = ["nsenter", "-t", str(self._pids[name]), "-n", "ip", "-batch", "-"]
        subprocess.run(enter, input="\n".join(commands), text=True, check=True)

    # Commands on a machine

    def argv(
        self,
        name: str,
        *command: str,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Build the command as a login there would start it. It exits with `nsenter`: killing the Popen is enough."""
        if name not in self._pids:
            raise ValueError(f"no machine is called {name}, or it has no power: {', '.join(self._pids)}")
        enter = ["nsenter", "-t", str(self._pids[name]), "-m", "-u", "-i", "-n", "-p", "--"]
        who = ["setpriv", "--pdeathsig", "KILL"]
        if user != "root":
            who += ["--reuid", user, "--regid", user, "--init-groups"]
        login = {
            "HOME": USERS[user],
            "USER": user,
            "LOGNAME": user,
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "TMPDIR": str(self.folder / "tmp"),  # torch leaves files there
        }
        settings = [f"{key}={value}" for key, value in {**login, **(env or {})}.items()]
        return [*enter, *who, "env", "-C", str(cwd or USERS[user]), *settings, *command]

    def start(
        self,
        name: str,
        *command: str,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        argv = self.argv(name, *command, user=user, cwd=cwd, env=env)
        popen = {"stdin": subprocess.DEVNULL, "text": True, "env": outer_environment(), **popen}
        return subprocess.Popen(argv, **popen)

    def run(
        self,
        name: str,
        *command: str,
        check: bool = False,
        input: str | None = None,
        timeout: float = 60,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(name, *command, **{**pipes, **how}) as process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise LabError(f"{name}: {shlex.join(command)} exits {process.returncode}\n{out or ''}{err or ''}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to what `start` started; the Popen's own pid is that of nsenter, which forwards none."""
        os.kill(child_of(process.pid), number)
        if number == signal.SIGCONT:
            os.kill(process.pid, number)  # nsenter has stopped together with its command

    def daemon(self, name: str, *command: str, **how: Any) -> None:
        """Start a program that daemonizes itself and becomes a child of the machine's pid 1."""
        with (self.folder / "log" / f"{name}.{Path(command[0]).name}.out").open("a") as log:
            self.run(name, *command, check=True, stdout=log, stderr=log, **how)


def outer_environment() -> dict[str, str]:
    """Our environment, without the variables of a Slurm outside the lab."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PMI"))}
