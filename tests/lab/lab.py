"""One lab: its machines, what runs on them, and the faults that a test can cause."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab.accounting import Accounting
from tests.lab.clients import Clients
from tests.lab.machines import HEAD, HEAD_ADDRESS, HERE, LabError, Machine, Machines, await_true
from tests.lab.proxy import Mode
from tests.lab.slurm import PORT, PROXY_PORT, Settings, Slurm
from tests.lab.sshd import Sshd

MAX_NODES = MAX_HOSTS = 64
PROFILE = {"name": "lab", "kind": "slurm", "gpus_per_node": 2, "gpu_request": "gpus-per-node", "env": {}}


class Lab:
    """A real Slurm cluster and real ssh hosts, inside a `with` block. The package describes it."""

    def __init__(
        self,
        nodes: int = 2,
        accounting: bool = False,
        ssh: int = 0,
        grace: int = 20,
        user_signal: bool = True,
        kill_wait: int = 5,
        laptop: bool = False,
    ) -> None:
        if not 0 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes is {nodes}, and must be 0 (no Slurm) to {MAX_NODES}")
        if not 0 <= ssh <= MAX_HOSTS:
            raise ValueError(f"ssh is {ssh}, and must be 0 to {MAX_HOSTS}")
        self.nodes = [Machine(f"node{i}", "node", (node_address(i),)) for i in range(1, nodes + 1)]
        self.hosts = [Machine(f"ssh{i}", "ssh", host_addresses(i)) for i in range(1, ssh + 1)]
        if ssh:
            self.hosts.append(Machine("bastion", "ssh", ("10.77.0.100", "10.78.0.254")))
            self.hosts.append(Machine("private1", "ssh", ("10.78.0.1",)))
        # Reaches the head by ssh, and nothing else.
        self.laptops = [Machine("laptop", "laptop", ("10.77.0.200",))] if laptop else []
        self._settings = Settings(accounting, grace, user_signal, kill_wait)

    def __enter__(self) -> Lab:
        self.folder = Path(tempfile.mkdtemp(prefix="gptctl-lab-"))
        self.machines = Machines(self.folder)
        self.slurm = Slurm(self.machines, self.nodes, self._settings)
        self.clients = Clients(self.machines)
        self.accounting = Accounting(self.machines)
        self.sshd = Sshd(self.machines, [*self.hosts, *([HEAD] if self.laptops else [])])
        self._proxy: subprocess.Popen[str] | None = None
        self._orders = 0
        self.machines.open()
        try:
            self._write_files()
            self._start()
        except BaseException as error:
            logs = self.logs() if isinstance(error, LabError) else ""
            self.__exit__(None, None, None)
            if logs:
                raise LabError(f"{error}\n{logs}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.machines.close()
        if self._proxy:
            self._proxy.wait()

    def _write_files(self) -> None:
        self.folder.chmod(0o755)
        for name in ("clients", "etc", "private", "proxy", "real", "run", "shared", "small", "tmp"):
            (self.folder / name).mkdir()
        for name in ("shared", "tmp"):  # for all users
            (self.folder / name).chmod(0o1777)
        write_names(self.folder / "etc", [*self.nodes, *self.hosts, *self.laptops])
        self.clients.write_files()
        if self.nodes:
            self.slurm.write_files()
        if self.sshd.hosts:
            self.sshd.write_files()

    def _start(self) -> None:
        self.machines.power_on_head()
        self.machines.power_on([*self.nodes, *self.hosts, *self.laptops])
        if self.sshd.hosts:
            self.sshd.give_keys()
            self.sshd.start([host.name for host in self.sshd.hosts])
        for machine in self.laptops:
            self.sshd.give_keys(machine.name)
        if self.nodes:
            self._start_munge()
            if self._settings.accounting:
                self.accounting.open()
            self.slurm.start_controller()
            self.slurm.start_nodes([node.name for node in self.nodes])

    def _start_munge(self) -> None:
        key, seed, log = (self.folder / "munge" / name for name in ("key", "seed", "log"))
        key.parent.mkdir(mode=0o700)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--key-file={key}", f"--seed-file={seed}", f"--log-file={log}"]
        self.machines.daemon("head", "munged", *files)

    # Commands

    def argv(self, name: str, *command: str, **how: Any) -> list[str]:
        """Wrap a command to run on a machine: head (the login node), node1…, ssh1…, bastion, private1, laptop."""
        return self.machines.argv(name, *command, **how)

    def run(self, name: str, *command: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine: `user` (root or gpt), `cwd` (its home), `env`, `check`, `input`, `timeout` (60)."""
        return self.machines.run(name, *command, **how)

    def start(self, name: str, *command: str, **how: Any) -> subprocess.Popen[str]:
        """Start a command on a machine: `user`, `cwd`, `env`, and what Popen takes. Killing the Popen kills the command."""
        return self.machines.start(name, *command, **how)

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to a command that `start` started."""
        self.machines.signal(process, number)

    # Machines

    def crash(self, name: str) -> None:
        """Cut the power: processes are killed, and no peer is notified."""
        self.machines.crash(name)

    def restart(self, name: str) -> None:
        """Power on again; return when jobs can run there, or sshd listens."""
        self.machines.restart(name)
        if name in (host.name for host in self.hosts):
            self.sshd.start([name])
        elif name in (machine.name for machine in self.laptops):
            self.sshd.give_keys(name)
        else:
            self.slurm.start_nodes([name])

    def cut(self, name: str) -> None:
        """Unplug the network cable: processes continue, but no packet arrives or leaves."""
        self.machines.cut(name)

    def restore(self, name: str) -> None:
        self.machines.restore(name)

    def restart_sshd(self, name: str) -> None:
        """Restart sshd, which closes all its connections."""
        self.sshd.restart(name)

    @property
    def key(self) -> Path:
        """The private key that all ssh hosts accept, for root and gpt."""
        return self.sshd.key

    @property
    def known_hosts(self) -> Path:
        return self.sshd.known_hosts

    # Slurm

    def stop_controller(self) -> None:
        """Make slurmctld accept connections but never answer, like an overloaded one."""
        self.slurm.stop_controller()

    def continue_controller(self) -> None:
        self.slurm.continue_controller()

    def kill_controller(self) -> None:
        """Kill slurmctld with SIGKILL: it loses what it has not saved, and it saves at most every 5 s."""
        self.slurm.kill_controller()

    def await_saved(self) -> None:
        """Wait until slurmctld has saved everything that it knows now."""
        self.slurm.await_saved()

    def start_controller(self) -> None:
        """Start slurmctld with its saved state; return when it answers."""
        self.slurm.start_controller()

    def stop_accounting(self) -> None:
        self.accounting.stop()

    def start_accounting(self) -> None:
        self.accounting.start()

    # Clients

    def calls(self) -> list[tuple[float, str]]:
        """List (time, name) of every Slurm command that was started on the head."""
        return self.clients.calls()

    def count_of(self, name: str) -> int:
        return sum(called == name for _, called in self.calls())

    def break_client(self, name: str, body: str | None = None) -> None:
        """Replace a client on all machines by a line of bash, such as `sleep 5; exec "$LAB_REAL" "$@"`; None removes it."""
        self.clients.break_one(name, body)

    def restore_client(self, name: str) -> None:
        self.clients.restore(name)

    def proxy(self, mode: str) -> None:
        """Break connections from the head's clients to slurmctld, see proxy.py; `pass` removes the proxy."""
        Mode(mode)
        self._orders += 1
        new = self.folder / "proxy" / "mode.new"
        new.write_text(f"{self._orders} {mode}")
        new.rename(new.with_suffix(""))
        if mode == "pass":
            self.slurm.point_clients_to(PORT)
            return
        if self._proxy is None:
            self._start_proxy()
        self.slurm.point_clients_to(PROXY_PORT)

    def _start_proxy(self) -> None:
        command = [sys.executable, "-IS", str(HERE / "proxy.py"), str(self.folder / "proxy"), HEAD_ADDRESS]
        with (self.folder / "log" / "proxy.log").open("w") as log:
            self._proxy = self.start("head", *command, str(PROXY_PORT), str(PORT), stdout=log, stderr=log)
        listens = f"test -n \"$(ss -Hltn 'sport = {PROXY_PORT}')\""
        await_true(lambda: not self.run("head", "sh", "-c", listens).returncode, "the proxy listens")

    def faults(self) -> int:
        """Return how many connections the proxy has broken so far."""
        file = self.folder / "proxy" / "faults"
        return len(file.read_text().splitlines()) if file.exists() else 0

    # For tests

    @property
    def shared(self) -> Path:
        """A folder that all users may write to and that all but ssh hosts' users see, at the same path as here."""
        return self.folder / "shared"

    @property
    def small(self) -> Path:
        """The same with 4 MB of space; from outside the lab it looks empty."""
        return self.folder / "small"

    def profile(self, folder: Path, **keys: Any) -> Path:
        """Write clusters/lab.yaml to a folder; `keys` override the usual ones."""
        return write_profile(folder, "lab", {**PROFILE, "run_root": str(self.shared / "runs"), **keys})

    def hosts_profile(self, folder: Path, name: str = "hosts", **keys: Any) -> Path:
        """Write a profile of all ssh hosts, which use the second network; private1 is behind the bastion."""
        hosts = [{"host": host.name, "address": host.addresses[-1]} for host in self.hosts if host.name != "bastion"]
        hosts[-1]["proxy_jump"] = "bastion"
        usual = {"kind": "ssh", "gpus_per_node": 2, "hosts": hosts, "run_root": "/home/runs", "python": sys.executable}
        return write_profile(folder, name, {**usual, **keys})

    def tidy(self) -> None:
        """Undo all faults: machines and daemons run, clients work, the queue is empty, nodes are idle."""
        self.clients.restore_all()
        if self._settings.accounting and self.accounting.stopped:
            self.start_accounting()
        ill = set(self.machines.cut_off)
        if self.nodes:
            self.proxy("pass")
            self.slurm.revive_controller()
            ill |= self.slurm.unwell()
        for name in ill - set(self.machines.crashed):  # faster than waiting until Slurm uses the node again
            self.crash(name)
        for name in self.machines.crashed:
            self.restart(name)
        if self.nodes:
            self.slurm.clear()

    def logs(self, lines: int = 12) -> str:
        """Return the last lines of all daemon logs."""
        files = sorted(file for file in (self.folder / "log").glob("*") if file.stat().st_size)
        return "\n".join(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-lines:]) for file in files)


def node_address(number: int) -> str:
    # The first ones as they have always been: tests and people know them.
    return f"10.77.0.{10 + number}" if number <= 12 else f"10.77.1.{number}"


def host_addresses(number: int) -> tuple[str, str]:
    """On the network of the head, and on that of the ranks."""
    low = f"0.{50 + number}" if number <= 12 else f"2.{number}"
    return f"10.77.{low}", f"10.78.{low}"


def write_profile(folder: Path, name: str, keys: dict[str, Any]) -> Path:
    import yaml

    file = Path(folder) / "clusters" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(keys, sort_keys=False))
    return file


def write_names(etc: Path, machines: list[Machine]) -> None:
    """Write the names of machines and users for all machines: the system's users and gpt; no other lookup is used."""
    hosts = ["127.0.0.1 localhost", f"{HEAD_ADDRESS} head"]
    hosts += [f"{machine.addresses[0]} {machine.name}" for machine in machines]
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    users = [user for user in users if user[0] != "gpt"] + ["gpt:x:2000:2000::/home/gpt:/bin/bash".split(":")]
    groups = [line for line in Path("/etc/group").read_text().splitlines() if not line.startswith("gpt:")]
    texts = {
        "hosts": hosts,
        "nsswitch.conf": ["passwd: files", "group: files", "shadow: files", "hosts: files"],
        "passwd": [":".join(user) for user in users],
        "group": [*groups, "gpt:x:2000:"],
        # No user has a password, but none is locked: sshd rejects a user whose field starts with "!".
        "shadow": [f"{user[0]}:*:19000:0:99999:7:::" for user in users],
    }
    for name, content in texts.items():
        (etc / name).write_text("\n".join(content) + "\n")
    (etc / "shadow").chmod(0o600)
