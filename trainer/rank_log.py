"""Runs a rank with its output in a file of its own, and notes when and how it ended.

    python rank_log.py SCRIPT [ARGS]...        python rank_log.py -m MODULE [ARGS]...

torchrun starts this instead of the program. It sends stdout and stderr into `$GPTCTL_LOG_DIR/workerlog.<RANK>` before
anything else is loaded, so that C++ and NCCL write there too, starts the program unchanged, passes signals on to it,
and ends as it ended. Two lines in `$GPTCTL_ATTEMPT_DIR/ranks.<node>.jsonl` say when it began and how it ended: what a
killed process cannot say itself. One file, standard library only: a copy of it works wherever Python does.
"""

from __future__ import annotations

import os
import sys

if (
    __name__ == "__main__"
):  # a program beside this file may be called json.py; nothing of its folder is meant here
    sys.path[:] = [
        entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))
    ]

import signal
import time

CANNOT_BE_HELPED = 93  # an exit code: whoever starts this again gets the same end
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    # The legacy launcher puts its own flag before the script; it is the script's.
    flags = [word for word in arguments[:1] if word.startswith(("--local-rank=", "--local_rank="))]
    program = arguments[len(flags) :]
    size = 2 if program[:1] == ["-m"] else 1
    if len(program) < size:
        print(__doc__, file=sys.stderr)
        return 2
    redirect(os.environ.get("GPTCTL_LOG_DIR", ""))
    attempt = os.environ.get("GPTCTL_ATTEMPT_DIR")
    if attempt and os.path.exists(
        os.path.join(attempt, "cannot-be-helped")
    ):  # torchrun restarts all the same
        return CANNOT_BE_HELPED
    folder = os.environ.get("GPTCTL_WORK_DIR", "")
    if os.path.isdir(folder):  # a container may have another one
        os.chdir(folder)
    return watch([sys.executable, "-u", *program[:size], *flags, *program[size:]])


def redirect(folder: str) -> None:
    """Sends descriptors 1 and 2 to this rank's file; where that fails, the node's output still has what it says."""
    if not folder:
        return
    try:
        file = os.open(
            os.path.join(folder, f"workerlog.{rank()}"),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
            0o600,
        )
    except OSError as error:
        print(f"rank {rank()} has no log file: {error.filename}: {error.strerror}", file=sys.stderr)
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def ends_with_a_line() -> bool:
    """Whether this rank's file does, so that last words stay a line of their own."""
    try:
        with open(os.path.join(os.environ["GPTCTL_LOG_DIR"], f"workerlog.{rank()}"), "rb") as file:
            return (
                not file.seek(0, os.SEEK_END)
                or not file.seek(-1, os.SEEK_END)
                or file.read() == b"\n"
            )
    except (KeyError, OSError):
        return True


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def watch(command: list[str]) -> int:
    """Starts the program, waits for its end, notes it, and returns its exit code or dies of the same signal."""
    die_with_parent(os.getppid())
    signals = [getattr(signal, name) for name in FORWARDED]
    signal.pthread_sigmask(
        signal.SIG_BLOCK, signals
    )  # none gets lost between fork and the handlers
    child = os.fork()
    if not child:
        become(command, signals)
    for number in signals:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    note("start", child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status, usage = os.wait4(child, 0)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)  # its process number may be another's from now on
    code, killer = (
        (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
    )
    note("end", child, exit=code, signal=killer, max_rss_mb=usage.ru_maxrss >> 10)
    if code == CANNOT_BE_HELPED:
        append("cannot-be-helped", "")
    if killer is not None:
        name = next((known.name for known in signal.Signals if known == killer), f"signal {killer}")
        said = f"rank {rank()} (pid {child}) was killed by {name}"
        print(f"{'' if ends_with_a_line() else chr(10)}{said}", file=sys.stderr, flush=True)
    if status:
        end_group(child)
    if killer is not None:
        die_of(killer)
    assert code is not None
    return code


def become(command: list[str], signals: list[signal.Signals]) -> None:
    """In the child. A process group of its own: a signal to torchrun's group comes to it once, through the parent."""
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        os.execv(command[0], command)
    finally:
        os._exit(127)


def die_with_parent(parent: int) -> None:
    """Nobody stops a rank whose torchrun is gone: it would hold its GPU for ever. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def end_group(group: int) -> None:
    """A program that failed leaves no data loaders behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        return


def die_of(number: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core that matters is the program's own
    signal.signal(number, signal.SIG_DFL) if number not in (
        signal.SIGKILL,
        signal.SIGSTOP,
    ) else None
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def note(event: str, child: int, **facts: int | None) -> None:
    """One line for the launcher, in the file of this node. That it cannot be written is no reason to end the rank."""
    import json

    node = os.environ.get("GPTCTL_NODE", "0")
    who = {"rank": rank(), "local_rank": int(os.environ.get("LOCAL_RANK", "0")), "node": int(node)}
    line = {
        "event": event,
        **who,
        "host": os.uname().nodename,
        "pid": child,
        "time": time.time(),
        **facts,
    }
    append(f"ranks.{node}.jsonl", json.dumps(line) + "\n")


def append(name: str, text: str) -> None:
    folder = os.environ.get("GPTCTL_ATTEMPT_DIR")
    if not folder:
        return
    try:
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, text.encode())
        os.close(file)
    except OSError as error:
        print(f"rank {rank()}: {error.filename}: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
