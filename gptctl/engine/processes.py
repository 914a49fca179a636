"""Processes of this machine: who is who though numbers are reused, and all processes of a job. Reads Linux's /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")

# What another launcher around gptctl left in the environment would be taken for the job's own.
_LEAKING = (
    *(
        "GPTCTL_",
        "SLURM_",
        "SBATCH_",
        "SRUN_",
        "SALLOC_",
        "SQUEUE_",
        "SACCT_",
        "SINFO_",
        "SCANCEL_",
        "SCONTROL_",
    ),
    *("PMI_", "PMIX_", "PMI2_", "PET_", "TORCHELASTIC_"),
)
_KEPT = ("GPTCTL_HOME", "SLURM_CONF")
_LEAKED = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT OMP_NUM_THREADS BASH_ENV ENV TORCH_NCCL_ASYNC_ERROR_HANDLING"
).split()


def this_process() -> dict[str, Any]:
    return identity(os.getpid())


def identity(pid: int) -> dict[str, Any]:
    """A process, named so that no other one is ever taken for it."""
    return {"pid": pid, "started": _start_time(pid), "boot": boot_id(), "host": os.uname().nodename}


def is_here(process: Mapping[str, Any]) -> bool:
    """A host may get another name while it runs."""
    return is_same_boot(process) or process.get("host") == os.uname().nodename


def is_same_boot(process: Mapping[str, Any]) -> bool:
    return process.get("boot") == boot_id()


def is_alive(process: Mapping[str, Any]) -> bool:
    pid = process.get("pid")
    if not isinstance(pid, int) or not is_same_boot(process):
        return False
    started = _start_time(pid)
    return started is not None and started == process.get("started")


def boot_id() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """In clock ticks since the machine started; None when the process has ended, waited for or not."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def processes_of(run_dir: str) -> list[int]:
    """Every process of a job: each rank has a session of its own, so only the environment tells."""
    mark = b"\0GPTCTL_RUN_DIR=" + os.fsencode(run_dir) + b"\0"
    found = []
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with suppress(OSError):  # ended meanwhile, or another user's
                if mark in b"\0" + (PROC / entry / "environ").read_bytes():
                    found.append(int(entry))
    return [pid for pid in found if pid != os.getpid()]


def descendants(ancestor: int) -> list[int]:
    """Children, their children and so on; orphans count where the ancestor adopts them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with suppress(OSError):
                state, parent = (PROC / entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(entry))
    found, pending = [], [ancestor]
    while pending:
        new = children.get(pending.pop(), [])
        found += new
        pending += new
    return found


def adopt_orphans() -> None:
    """From now on, processes whose parent ends become children of this one: even those that hide their environment."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def kill_all(run_dir: str, ancestor: int | None = None, patience: float = 10.0) -> list[int]:
    """Kills every process of a job, again and again until none is left; returns those that outlived that."""
    from signal import SIGKILL

    deadline = time.monotonic() + patience
    while True:
        left = {*processes_of(run_dir), *(descendants(ancestor) if ancestor else ())}
        if not left or time.monotonic() > deadline:
            return sorted(left)
        for pid in left:
            send(pid, SIGKILL)
        time.sleep(0.02)


def send(pid: int, number: int) -> None:
    """A signal to a process that may have ended, or not be ours."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def clean_environment() -> dict[str, str]:
    """What this process was started with, without what would be taken for the job's own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or (name not in _LEAKED and not name.startswith(_LEAKING))
    }
    if "PYTHONPATH" in kept:  # a job starts in another folder
        kept["PYTHONPATH"] = os.pathsep.join(
            map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep))
        )
    return kept
