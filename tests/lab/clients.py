"""Wrappers of the Slurm commands: each records its call, then runs the real command or fails as told."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.lab.machines import Machines

NAMES = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "srun", "sinfo")
# In bash, because all of this is built in and needs no other process. `HOSTNAME` may come from another
# host: a job inherits the environment of its submit.
SHIM = """\
#!/bin/bash
LAB_REAL={real}
read -r LAB_HOST </proc/sys/kernel/hostname
echo "$EPOCHREALTIME $LAB_HOST {name}" >>{calls}
{body}
"""
BECOME_REAL = 'exec "$LAB_REAL" "$@"'


class Clients:
    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self._calls = self.folder / "calls"
        self._broken: set[str] = set()

    def write_files(self) -> None:
        """Write the wrappers; machine.sh mounts them over /usr/bin."""
        for name in NAMES:
            shim = self.folder / "clients" / name
            shim.write_text(self._shim(name, BECOME_REAL))
            shim.chmod(0o755)
        self._calls.touch()
        self._calls.chmod(0o666)

    def calls(self) -> list[tuple[float, str]]:
        """List the times and names of the commands started on the head."""
        lines = (line.split() for line in self._calls.read_text().splitlines())
        return [(float(when.replace(",", ".")), name) for when, host, name in lines if host == "head"]

    def break_one(self, name: str, body: str | None) -> None:
        self._broken.add(name)
        self._replace(name, body)

    def restore(self, name: str) -> None:
        self._broken.discard(name)
        self._replace(name, BECOME_REAL)

    def restore_all(self) -> None:
        for name in tuple(self._broken):
            self.restore(name)

    def _replace(self, name: str, body: str | None) -> None:
        if name not in NAMES:
            raise ValueError(f"{name} is none of {', '.join(NAMES)}")
        path = f"/usr/bin/{name}"
        if body is None:
            self.machines.run("head", "rm", "-f", path, check=True)
        else:
            shim = self._shim(name, body)
            self.machines.run("head", "install", "-m", "755", "/dev/stdin", path, input=shim, check=True)

    def _shim(self, name: str, body: str) -> str:
        real = shlex.quote(str(Path(self.folder, "real", name)))
        return SHIM.format(name=name, body=body, real=real, calls=shlex.quote(str(self._calls)))
