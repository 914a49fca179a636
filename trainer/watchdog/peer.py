"""The processes of other ranks, as the kernel of this host sees them. Works on Linux only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """The process of a rank. `began` distinguishes it from a later process with the same pid."""

    host: str
    pid: int
    began: str
    # The process that torchrun started, which is this one or the watcher of it: torchrun gives each
    # rank a session of its own, and this process leads it.
    leader: int  # 0: outside of this container

    @classmethod
    def of_this_rank(cls) -> Peer:
        return cls(socket.gethostname(), os.getpid(), _began(os.getpid()), os.getsid(0))

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this host, so that /proc has information about it."""
        return bool(self.began) and self.host == socket.gethostname()

    @property
    def state(self) -> str:
        """Such as `S (sleeping)`; empty if the process has exited, or is on another host."""
        if not self.is_here or _began(self.pid) != self.began:
            return ""
        return _state(Path(f"/proc/{self.pid}"))

    @property
    def has_exited(self) -> bool:
        """Whether it surely has exited; False if it is on another host."""
        return self.is_here and self.state[:1] in ("", "Z", "X")  # Z: zombie, X: dead

    @property
    def exit_is_known(self) -> bool:
        """Whether the launcher that started it knows; False if it is on another host."""
        # A process has a pid until its parent has asked how it exited: first this one, then its
        # watcher. A session that is also ours is not of torchrun, and its leader does not exit.
        has_launcher = self.leader != os.getsid(0)
        is_running = _began(self.pid) == self.began or (has_launcher and _began(self.leader))
        return self.is_here and not is_running

    def threads(self) -> Iterator[str]:
        """One entry per thread: its state, and where it waits in the kernel if that is readable."""
        for task in sorted(
            Path(f"/proc/{self.pid}/task").glob("*"), key=lambda task: int(task.name)
        ):
            facts = {name: _read(task / name).strip() for name in ("wchan", "syscall", "stack")}
            told = "".join(f"\n  {name}: {fact}" for name, fact in facts.items() if fact)
            yield f"thread {task.name} ({_read(task / 'comm').strip()}): {_state(task)}{told}\n"

    def __str__(self) -> str:
        return ", ".join(filter(None, [f"host {self.host}", f"pid {self.pid}", self.state]))


def _state(folder: Path) -> str:
    lines = _read(folder / "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")


def _began(pid: int) -> str:
    """The start time in clock ticks since boot."""
    # The second field is the program name in parentheses, which may contain spaces and parentheses.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
