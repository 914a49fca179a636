"""Outlives the owner of a lab and cleans up after it: `python keeper.py FOLDER COMMAND…`

COMMAND is `unshare --fork …`, the root of the lab's namespaces; the first line on standard input starts it. The lab
stops when standard input closes: the owner closes it or, however the owner dies, even by SIGKILL, the kernel does.
Knows nothing of Slurm.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def end(root: subprocess.Popen[bytes], folder: str) -> None:
    """Kill pid 1 of the lab: the kernel kills the rest, and `unshare` returns when all processes have exited."""
    try:
        os.kill(child_of(root.pid), signal.SIGKILL)
    except (OSError, IndexError):
        root.kill()
    wake_entries(folder)
    root.wait()


def wake_entries(folder: str) -> None:
    """Continue stopped nsenter processes: nsenter stops with its command, and the lab exits only after it reaps it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if command.startswith(b"nsenter\0") and folder.encode() in command:
                os.kill(int(process.name), signal.SIGCONT)
        except OSError:
            continue  # it has exited


def remove(folder: str) -> None:
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def main() -> None:
    folder, *command = sys.argv[1:]
    if sys.stdin.readline():
        # If the keeper itself is killed, the kernel kills the lab, too; only its folder remains.
        root = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
        os.close(1)  # the owner reads until all writers have closed it
        sys.stdin.read()
        end(root, folder)
    remove(folder)


if __name__ == "__main__":
    main()
