"""Processes of this machine: identify them although pids are reused, and find all those of a job.

Reads /proc, so it works on Linux only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptctl.engine.contract import CHECKPOINT_KEY_VARIABLE, NOTIFY_VARIABLE

PROC = Path("/proc")
PARENT_VARIABLE = "GPTCTL_PARENT"  # the process that a command on a node must not outlive
# That prove that nothing is left: of a process that forks and exits all the time, every second
# listing or so shows nothing.
NUM_EMPTY_LISTINGS = 10

# Variables of a launcher around gptctl, such as a Slurm job: the job would take them for its own.
_JOB_PREFIXES = tuple(
    "GPTCTL_ SLURM_ SBATCH_ SRUN_ SALLOC_ SQUEUE_ SACCT_ SINFO_ SCANCEL_ SCONTROL_ "
    "PMI_ PMIX_ PMI2_ PET_ TORCHELASTIC_".split()
)
_NOT_JOB_VARIABLES = (
    "GPTCTL_HOME",
    "GPTCTL_SHARED_MEMORY",
    "SLURM_CONF",
    CHECKPOINT_KEY_VARIABLE,
    NOTIFY_VARIABLE,
)
_JOB_VARIABLES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
    "ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "OMP_NUM_THREADS BASH_ENV ENV TORCH_NCCL_ASYNC_ERROR_HANDLING"
).split()


def this_process() -> dict[str, Any]:
    return identity(os.getpid())


def identity(pid: int) -> dict[str, Any]:
    """Describe a process so that no other one can be mistaken for it, even if its pid is reused."""
    return {"pid": pid, "started": _start_time(pid), "boot": boot_id(), "host": os.uname().nodename}


def is_here(process: Mapping[str, Any]) -> bool:
    """Whether a process runs, or ran, on this machine."""
    # By boot id first: a host may be renamed while it runs.
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
    """Return the start in clock ticks since boot, or None if the process has exited."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # Z, X: it has exited, but its parent has not waited for it yet.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def seconds_since_start(process: Mapping[str, Any]) -> float | None:
    """How long ago a process of this machine started, even if it has exited; None: unknown.

    By the clock that counts from the start of the machine, which nobody sets.
    """
    started = process.get("started")
    if not isinstance(started, int) or not is_same_boot(process):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def processes_of(run_dir: str) -> list[int]:
    """Return the pids of all processes of a job except this one and its parent."""
    # Each rank has its own session and process group, so only the environment identifies them.
    mark = b"\0GPTCTL_RUN_DIR=" + os.fsencode(run_dir) + b"\0"
    found = []
    for entry in os.listdir(PROC):
        if entry.isdigit():
            # A process may have exited meanwhile, or belong to another user.
            with suppress(OSError):
                if mark in b"\0" + (PROC / entry / "environ").read_bytes():
                    found.append(int(entry))
    # The parent of an agent is its guard, which must outlive it.
    return [pid for pid in found if pid not in (os.getpid(), os.getppid())]


def descendants(ancestor: int) -> list[int]:
    """Return the pids of all descendants, including orphans that the ancestor adopted."""
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


def disregard(*signals: signal.Signals) -> None:
    """Survive these signals."""
    # A handler that does nothing: ranks would inherit a signal that is ignored.
    for number in signals:
        signal.signal(number, lambda number, frame: None)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that `descendants` finds them.

    Some programs overwrite their environment: `processes_of` cannot find those.
    """
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def exit_with_parent() -> None:
    """Get SIGHUP when the parent exits, such as the sshd of a connection that broke."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGHUP, 0, 0, 0)
    # It may have exited before: then this process has another parent by now.
    expected = os.environ.pop(PARENT_VARIABLE, None)
    if expected is not None and (str(os.getppid()) != expected or expected == "1"):
        os._exit(128 + signal.SIGHUP)


def kill_all(
    run_dir: str, ancestor: int | None = None, *spared: int, timeout: float = 10.0
) -> list[int]:
    """Kill every process of a job; return the pids that are alive after `timeout` seconds."""
    from signal import SIGKILL

    deadline, num_empty = time.monotonic() + timeout, 0
    left = found = jobs_processes(run_dir, ancestor, *spared)
    # Repeat: a process may have started another one between listing and killing. Nothing at the
    # first look is the usual case, after a job that ended by itself.
    while left and num_empty < NUM_EMPTY_LISTINGS:
        if time.monotonic() > deadline:
            return left
        for pid in found:
            send(pid, SIGKILL)
        time.sleep(0.01)
        found = jobs_processes(run_dir, ancestor, *spared)
        num_empty, left = (0, found) if found else (num_empty + 1, left)
    return []


def jobs_processes(run_dir: str, ancestor: int | None, *spared: int) -> list[int]:
    """Return the pids of a job's processes: those with its mark, and descendants of `ancestor`."""
    found = {*processes_of(run_dir), *(descendants(ancestor) if ancestor else ())}
    return sorted(found - {*spared})


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have exited or belong to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that a job would take for its own."""
    # Those are of the user: where records and the cluster are, what signs checkpoints, and whom to
    # notify.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NOT_JOB_VARIABLES
        or (name not in _JOB_VARIABLES and not name.startswith(_JOB_PREFIXES))
    }
    # A job starts in another folder, where relative paths would point elsewhere.
    if "PYTHONPATH" in kept:
        kept["PYTHONPATH"] = os.pathsep.join(
            map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep))
        )
    return kept
