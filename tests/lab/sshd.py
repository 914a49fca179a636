"""The ssh hosts of a lab: one user key for all of them, and a host key and an sshd for each."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.machines import USERS, Machine, Machines, await_true

CONF = """\
HostKey {folder}/{name}.hostkey
PidFile {run}/sshd-{name}.pid
AuthorizedKeysFile .ssh/authorized_keys {folder}/key.pub
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UseDNS no
PrintMotd no
MaxStartups 50
MaxSessions 50
AcceptEnv LANG LC_* GPTCTL_*
SetEnv TMPDIR={tmp}
Subsystem sftp internal-sftp
"""


class Sshd:
    def __init__(self, machines: Machines, hosts: list[Machine]) -> None:
        self.machines, self.hosts = machines, hosts
        self.folder = machines.folder / "ssh"
        self.key, self.known_hosts = self.folder / "key", self.folder / "known_hosts"

    def write_files(self) -> None:
        self.folder.mkdir()
        make_key(self.key)
        known = []
        for host in self.hosts:
            public = make_key(self.folder / f"{host.name}.hostkey")
            known += [f"{','.join((host.name, *host.addresses))} {public}"]
            paths = {"folder": self.folder, "run": self.machines.folder / "run", "tmp": self.machines.folder / "tmp"}
            (self.folder / f"{host.name}.conf").write_text(CONF.format(name=host.name, **paths))
        self.known_hosts.write_text("".join(known))

    def give_keys(self, machine: str = "head") -> None:
        """On this machine, `ssh ssh1` is enough for both users."""
        for user, home in USERS.items():
            for file, name in ((self.key, "id_ed25519"), (self.known_hosts, "known_hosts")):
                self.machines.run(
                    machine, "install", "-D", "-m600", "-o", user, str(file), f"{home}/.ssh/{name}", check=True
                )
            self.machines.run(machine, "chown", user, f"{home}/.ssh", check=True)

    def start(self, names: list[str]) -> None:
        for name in names:
            self._pid_file(name).unlink(missing_ok=True)
            self.machines.daemon(name, "/usr/sbin/sshd", "-f", str(self.folder / f"{name}.conf"))
        for name in names:  # sshd writes the file when it listens
            await_true(self._pid_file(name).exists, f"sshd of {name} listens")

    def restart(self, name: str) -> None:
        """Kill sshd and all its sessions: each has a process of that name."""
        self.machines.run(name, "pkill", "-KILL", "-x", "sshd")
        self.start([name])

    def _pid_file(self, name: str) -> Path:
        return self.machines.folder / "run" / f"sshd-{name}.pid"


def make_key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.stem, "-f", str(path)], check=True)
    return Path(f"{path}.pub").read_text()
