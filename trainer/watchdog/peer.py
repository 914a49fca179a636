"""The processes of the other ranks, as the kernel of this host sees them. Linux tells all of it, others nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """The process of a rank, told from a later one with the same number by the moment it began."""

    host: str
    pid: int
    began: str

    @classmethod
    def of_this_rank(cls) -> Peer:
        return cls(socket.gethostname(), os.getpid(), _began(os.getpid()))

    @property
    def is_here(self) -> bool:
        return bool(self.began) and self.host == socket.gethostname()

    @property
    def state(self) -> str:
        """`S (sleeping)`; nothing where the process is gone, or on another host."""
        if not self.is_here or _began(self.pid) != self.began:
            return ""
        return _state(Path(f"/proc/{self.pid}"))

    @property
    def is_gone(self) -> bool:
        return self.is_here and self.state[:1] in ("", "Z", "X")

    def threads(self) -> Iterator[str]:
        """A line about every thread, and where in the kernel it waits as far as that may be read."""
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
    """In the kernel's own unit; the name before it may hold anything."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
