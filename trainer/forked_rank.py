"""Starts the ranks of the trainer as forks of torchrun, which has imported torch already.

An import of torch takes 1.4 CPU seconds: for two ranks on two cores, half of the time until the
first step. torchrun starts `rank_log.py` in a new Python, and that starts the trainer in another
one; here both are forks; log, environment, signals and exit codes are the same as without.
Only for jobs on CPUs: a process in which a library has opened a GPU must not be forked.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from trainer import rank_log
from trainer.program import configure_threads, without_collection
from trainer.startup import register_stacks

PR_SET_NAME = 15  # of Linux
# The copy of rank_log.py beside the package, and what torchrun starts with it.
RANK_LOG = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank_log.py")
COMMAND = (sys.executable, "-u", RANK_LOG, "-m", "trainer")


def make_torchrun_fork() -> None:
    """Change how this torchrun starts ranks. Call this before it imports torch.

    torch has no option for it. Any other command is executed, as always.
    """
    # OpenMP reads its variable when torch is imported. Elsewhere than on Linux, libraries with
    # threads do not survive a fork.
    if "OMP_NUM_THREADS" not in os.environ or not sys.platform.startswith("linux"):
        return
    configure_threads()
    with without_collection():
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        import trainer.train
        import trainer.watchdog  # noqa: F401

        with suppress(Exception):  # this only saves time
            _import_for_layout()

    execute = SubprocessHandler._popen

    def start(handler: Any, words: tuple[str, ...], environment: dict[str, str]) -> Any:
        has_own_files = handler._stdout or handler._stderr
        if words[: len(COMMAND)] != COMMAND or has_own_files:
            return execute(handler, words, environment)
        return ForkedRank(words, env=environment)

    SubprocessHandler._popen = start  # type: ignore[method-assign,assignment]


def _import_for_layout() -> None:
    """Import what only some layouts need: 1 to 1.6 CPU seconds, here once for all ranks."""
    with open(os.path.join(os.environ["GPTCTL_RUN_DIR"], "config.json"), "rb") as file:
        layout = json.load(file)["layout"]
    if layout["sharding"] > 1:
        import trainer.parallel.sharding
    if layout["pp"] > 1:
        import trainer.parallel.pipeline  # noqa: F401


class ForkedRank(subprocess.Popen[bytes]):
    """A process that torchrun can poll and kill, like those that it executes."""

    def _execute_child(self, words: Sequence[str], *settings: Any, **more: Any) -> None:
        environment = next(each for each in settings if isinstance(each, dict))
        # Blocked until the child has its own handlers: it must not run those of torchrun.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if not self.pid:
                _become_rank(words[3:], environment, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._child_created = True


def _become_rank(
    arguments: Sequence[str], environment: Mapping[str, str], blocked: set[int | signal.Signals]
) -> NoReturn:
    """Do what Popen and a new Python would do. The stack of torchrun is below: never return."""
    code = 1
    try:
        os.setsid()
        # Objects of torchrun must never be finalized here: their descriptors are closed, and will
        # have other owners.
        gc.freeze()
        _close_files()
        _reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.clear()
        os.environ.update(environment)
        code = rank_log.main([*arguments], _run_program)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _close_files() -> None:
    """Close what torchrun has open. Not by number: the limit may be a billion."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the one that listed them
                os.close(int(name))


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_program(command: list[str]) -> NoReturn:
    """Run `python -u -m trainer ARGS` in this process, and exit as Python does."""
    import ctypes

    code: object = 0
    try:
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {rank_log.rank()}".encode(), 0, 0, 0)
        register_stacks()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.argv, sys.path[0] = ["-m", *command[4:]], os.getcwd()
        runpy.run_module(command[3], run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code or 0))  # type: ignore[call-overload]
