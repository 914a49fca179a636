"""Give each machine of a lab the same share of a core, with the kernel's control groups.

Otherwise ten busy machines compete for the cores of this one, unlike the machines of a cluster.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.lab.lab import Lab

PERIOD = 10_000  # microseconds
FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # versions 1 and 2


class Shares:
    """Open it before the lab, so that it closes after the lab, when the groups are empty."""

    def __enter__(self) -> Shares:
        self._groups: list[Path] = []
        return self

    def give(self, lab: Lab, name: str, share: float) -> None:
        """Create the groups; raise OSError if that is not possible here."""
        is_second = (SECOND / "cgroup.controllers").exists()
        group = (SECOND if is_second else FIRST) / f"{lab.folder.name}-{name}"
        group.mkdir()
        self._groups.append(group)
        quota = int(share * PERIOD)
        if is_second:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        for pid in processes_beside(lab.machines.pid_1(name)):
            (group / "cgroup.procs").write_text(str(pid))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for group in self._groups:
            for _ in range(100):  # processes that were just killed are still in it
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)


def processes_beside(pid: int) -> list[int]:
    """All in the same pid namespace."""
    space = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdecimal() and os.readlink(f"/proc/{entry}/ns/pid") == space:
                found.append(int(entry))
    return found
