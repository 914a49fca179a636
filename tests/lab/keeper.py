"""Outlives the owner of a lab and clears up: `python keeper.py FOLDER COMMAND…`

COMMAND is `unshare --fork …`, the root of the lab's namespaces; a first line on standard input starts it. They end when
standard input does, and that is closed by the owner or, however it dies, by the kernel: there is one way out, and a
SIGKILL takes it too. Knows nothing of Slurm.
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
    """Kills pid 1 of the lab: the kernel kills the rest, and `unshare` returns only when all of it is gone."""
    try:
        os.kill(child_of(root.pid), signal.SIGKILL)
    except (OSError, IndexError):
        root.kill()
    wake_entries(folder)
    root.wait()


def wake_entries(folder: str) -> None:
    """nsenter stops when its command is stopped, and the lab cannot end before it has taken note of the command's end."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if command.startswith(b"nsenter\0") and folder.encode() in command:
                os.kill(int(process.name), signal.SIGCONT)
        except OSError:
            continue  # it has ended


def remove(folder: str) -> None:
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def main() -> None:
    folder, *command = sys.argv[1:]
    if sys.stdin.readline():
        # Should the keeper itself be killed, the lab goes as well, though its folder stays.
        root = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
        os.close(1)  # the owner reads until all writers of it are gone
        sys.stdin.read()
        end(root, folder)
    remove(folder)


if __name__ == "__main__":
    main()
