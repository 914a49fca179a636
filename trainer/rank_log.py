"""Runs one rank with its output in its own file, and records when it started and how it exited.

    python rank_log.py SCRIPT [ARGS]...        python rank_log.py [-P] -m MODULE [ARGS]...

torchrun starts this instead of the program. It redirects stdout and stderr to
`$GPTCTL_LOG_DIR/workerlog.<RANK>` before anything else is loaded, so that C++ and NCCL write there
too. Then it starts the program unchanged, forwards signals to it, and exits as the program did.
Two lines in `$GPTCTL_ATTEMPT_DIR/ranks.<node>.jsonl` record start and exit, which a killed process
could not do itself. With -P, the module is imported from the folder of this file, not from the
current one. One file, standard library only: a copy works wherever Python does.
"""

from __future__ import annotations

import os
import sys

# Python puts the folder of this file first in the search path. A program in the same folder may be
# named json.py, and would hide a standard module.
if __name__ == "__main__":
    sys.path[:] = [
        entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))
    ]

import errno
import signal
import stat
import time
from collections.abc import Callable, Iterator

UNRECOVERABLE = 93  # exit code: a restart would fail in the same way
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
PR_SET_PDEATHSIG = 1
# What `python -P -m MODULE` does, for Python 3.10, which has no -P.
RUN_MODULE = (
    "import runpy, sys; del sys.path[0]; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def main(arguments: list[str], start_program: Callable[[list[str]], object] | None = None) -> int:
    """Run a rank. `start_program` replaces the program that runs in the child; it never returns."""
    # torch.distributed.launch passes this flag as our first argument; it belongs to the script.
    flags = [word for word in arguments[:1] if word.startswith(("--local-rank=", "--local_rank="))]
    program = arguments[len(flags) :]
    is_frozen = program[:2] == ["-P", "-m"]
    program = program[is_frozen:]
    size = 2 if program[:1] == ["-m"] else 1
    if len(program) < size:
        print(__doc__, file=sys.stderr)
        return 2
    redirect(os.environ.get("GPTCTL_LOG_DIR", ""))
    attempt = os.environ.get("GPTCTL_ATTEMPT_DIR")
    # torchrun restarts ranks whatever their exit code was; this ends such restarts at once.
    if attempt and os.path.exists(os.path.join(attempt, "unrecoverable")):
        return UNRECOVERABLE
    folder = os.environ.get("GPTCTL_WORK_DIR", "")
    if os.path.isdir(folder):  # the path may not exist inside a container
        os.chdir(folder)
    start = program[:size]
    if is_frozen:
        # Without the current folder: later edits there must not change a queued job.
        start = ["-P", *start] if sys.version_info >= (3, 11) else ["-c", RUN_MODULE, start[1]]
        paths = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Unbuffered: a killed process must not take its last lines with it.
    command = [sys.executable, "-u", *start, *flags, *program[size:]]
    return watch(command, start_program or execute)


def redirect(folder: str) -> None:
    """Redirect descriptors 1 and 2 to this rank's file. If that fails, the node's log gets them."""
    if not folder:
        return
    try:
        file = open_own(os.path.join(folder, f"workerlog.{rank()}"))
    except OSError as error:
        text = f"rank {rank()}: cannot open log file {error.filename}: {error.strerror}"
        print(text, file=sys.stderr)
        return
    os.dup2(file, 1)  # descriptors, not sys.stdout: libraries write to them directly
    os.dup2(file, 2)
    os.close(file)


def open_own(path: str) -> int:
    """Open a file of ours to append. Raises OSError for a link, and for a FIFO, without waiting."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return file


def enable_stack_dumps(run_dir: str) -> None:
    """Let Python import `startup.py` before the program, which removes this entry again."""
    folder = os.path.join(run_dir, "python")
    if run_dir and os.path.isdir(folder):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([before] if before else [])])


def ends_with_a_line() -> bool:
    """Whether this rank's log ends with a newline, so that our message starts on a new line."""
    try:
        path = os.path.join(os.environ["GPTCTL_LOG_DIR"], f"workerlog.{rank()}")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return (
                not file.seek(0, os.SEEK_END)
                or not file.seek(-1, os.SEEK_END)
                or file.read(1) == b"\n"
            )
    except (KeyError, OSError):
        return True


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def watch(command: list[str], start_program: Callable[[list[str]], object]) -> int:
    """Start the program, wait for its exit, and record it.

    Returns the exit code of the program. If a signal killed it, kills itself with the same signal.
    """
    die_with_parent(os.getppid())
    log_start, kills = log_size(), oom_kills()
    signals = [getattr(signal, name) for name in FORWARDED]
    # Blocked signals stay pending, so none is lost between the fork and the handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if not child:
        become_program(command, start_program, signals)
    for number in signals:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    note("start", child, log_start=log_start)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    # Do not reap it yet: a signal that arrives now is still forwarded to its pid, which another
    # process may get afterwards.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    _, status, usage = os.wait4(child, 0)
    code, killer = (
        (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
    )
    # Only the out-of-memory killer of the kernel explains SIGKILL; nobody else counts its kills.
    now = oom_kills() if killer == signal.SIGKILL else kills
    oom = next((where for where, number in now.items() if number > kills.get(where, number)), None)
    note("end", child, exit=code, signal=killer, max_rss_mb=usage.ru_maxrss >> 10, oom=oom)
    # Tell the launcher and later restarts, because torchrun hides the exit code of a rank.
    if code == UNRECOVERABLE:
        append("unrecoverable", "")
    if killer is not None:
        name = next((known.name for known in signal.Signals if known == killer), f"signal {killer}")
        said = f"rank {rank()} (pid {child}) was killed by {name}"
        print(f"{'' if ends_with_a_line() else chr(10)}{said}", file=sys.stderr, flush=True)
    if status:
        kill_group(child)
    if killer is not None:
        exit_by_signal(killer)
    assert code is not None
    return code


def become_program(
    command: list[str],
    start_program: Callable[[list[str]], object],
    signals: list[signal.Signals],
) -> None:
    """Run the program in the child, in its own process group.

    So a signal to torchrun's group reaches it only once, forwarded by the parent.
    """
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        start_program(command)
    finally:
        os._exit(127)  # exec failed: never return into the parent's code


def execute(command: list[str]) -> None:
    enable_stack_dumps(os.environ.get("GPTCTL_RUN_DIR", ""))
    os.execv(command[0], command)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent exits. Linux only.

    Otherwise nothing stops a rank whose torchrun was killed, and it would block its GPU.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before prctl took effect
        os._exit(127)


def kill_group(group: int) -> None:
    """Kill the processes that a failed program left behind, such as data loaders."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        return


def exit_by_signal(number: int) -> None:
    """Exit by the same signal, so that torchrun reports it as if it had started the program."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has already dumped its core
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # their handlers cannot be changed
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def log_size() -> int:
    """The size of this rank's log: an earlier attempt of torchrun may have written to it."""
    try:
        return os.stat(os.path.join(os.environ["GPTCTL_LOG_DIR"], f"workerlog.{rank()}")).st_size
    except (KeyError, OSError):
        return 0


def oom_kills() -> dict[str, int]:
    """How many processes the kernel has killed for lack of memory: of this group, and of all."""
    groups = [line.split(":", 2) for line in lines_of("/proc/self/cgroup")]
    paths = [path for _, names, path in groups if names in ("", "memory")]
    # Version 1 and 2 of control groups; a container may see its own group at the root.
    files = [f"/sys/fs/cgroup/memory{path}/memory.oom_control" for path in [*paths, ""]]
    files += [f"/sys/fs/cgroup{path}/memory.events" for path in [*paths, ""]]
    own = (count for file in files for count in counts_of(file))
    counted = {"cgroup": next(own, None), "machine": next(counts_of("/proc/vmstat"), None)}
    return {where: number for where, number in counted.items() if number is not None}


def counts_of(file: str) -> Iterator[int]:
    return (int(line.split()[1]) for line in lines_of(file) if line.startswith("oom_kill "))


def lines_of(file: str) -> list[str]:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read().splitlines()
    except OSError:
        return []


def note(event: str, child: int, **facts: int | str | None) -> None:
    """Append one line for the launcher to the file of this node. Failing to write is not fatal."""
    import json

    node = os.environ.get("GPTCTL_NODE", "0")
    who = {"rank": rank(), "local_rank": int(os.environ.get("LOCAL_RANK", "0")), "node": int(node)}
    line = {
        "event": event,
        **who,
        "host": os.uname().nodename,
        "pid": child,
        "time": time.time(),
        "clock": time.monotonic(),  # stays true if somebody sets the time
        **facts,
    }
    append(f"ranks.{node}.jsonl", json.dumps(line) + "\n")


def append(name: str, text: str) -> None:
    folder = os.environ.get("GPTCTL_ATTEMPT_DIR")
    if not folder:
        return
    try:
        file = open_own(os.path.join(folder, name))
        os.write(file, text.encode())  # one write with O_APPEND: lines of ranks do not mix
        os.close(file)
    except OSError as error:
        text = f"rank {rank()}: cannot write {error.filename}: {error.strerror}"
        print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
