"""Runs a program of this package: threads, stop requests, and errors as messages and exit codes.

Used by the training (`python -m trainer`) and by the tasks (`python -m trainer.tasks.NAME`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from trainer.errors import OUT_OF_REACH, WRONG_USAGE, Finding, UserError
from trainer.rank_log import UNRECOVERABLE
from trainer.stop import StopRequest

if TYPE_CHECKING:
    from trainer.metrics import Log

Program = Callable[[Sequence[str], StopRequest], None]


def run_program(program: Program, arguments: Sequence[str], is_task: bool = False) -> int:
    """Run a program with its arguments; return its exit code.

    A task that nobody would restart exits with 2 after wrong usage.
    """
    configure_threads()
    with StopRequest() as stop:  # before importing torch, which takes seconds
        try:
            with _exit_at_interrupt(), without_collection():
                import torch.distributed.elastic.multiprocessing.errors  # noqa: F401
            return _recorded(program, arguments, stop, is_task)
        except KeyboardInterrupt:  # while an error was reported
            return _interrupted()


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collection, which would take a sixth of the time and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections, too, skip what was imported
        gc.enable()


@contextmanager
def _exit_at_interrupt() -> Iterator[None]:
    """Exit at Ctrl-C without Python's exception: an import of C++ code may turn it into another."""
    before = signal.getsignal(signal.SIGINT)

    def leave(number: int, frame: FrameType | None) -> None:
        code = _interrupted()
        sys.stderr.flush()
        os._exit(code)

    if before is signal.default_int_handler:  # not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 130


def _recorded(program: Program, arguments: Sequence[str], stop: StopRequest, is_task: bool) -> int:
    """Run a program; torchrun learns of its exception by the error file."""
    from torch.distributed import is_initialized
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        code = record(_run)(program, arguments, stop) or 0
        if code == WRONG_USAGE and (not is_task or "RANK" in os.environ):
            code = UNRECOVERABLE
    except BaseException:
        if not is_initialized():
            raise
        traceback.print_exc()
        code = 1
    # Still initialized only after an error: a normal exit could then wait for other ranks.
    if is_initialized():
        from trainer.watchdog import exit_now

        exit_now(code)
    return code


def _run(program: Program, arguments: Sequence[str], stop: StopRequest) -> int:
    try:
        program(arguments, stop)
    except UserError as error:
        print_error(error)
        is_told = error.exit_code in (OUT_OF_REACH, WRONG_USAGE)
        return error.exit_code if is_told else UNRECOVERABLE
    except RuntimeError as error:
        # Before the watchdog runs, a lost connection is all that this rank knows.
        from trainer.watchdog.network_errors import LOST, nccl_error

        is_lost = LOST.search(str(error))
        problem = "another rank exited unexpectedly" if is_lost else nccl_error(error)
        if not problem:
            raise
        print_error(UserError(problem, "see the logs of the other ranks", OUT_OF_REACH))
        return OUT_OF_REACH
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of the log exited
        # Python flushes stdout at exit, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def configure_threads() -> None:
    """Configure OpenMP before torch is loaded: short spinning, and cores shared by local ranks.

    A waiting thread spins for some microseconds, then sleeps. Without spinning, a step of a small
    model takes 1.5 times as long; with libgomp's default, six times as long on a busy machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(text)) if text.isdecimal() else 1
    # torchrun sets OMP_NUM_THREADS=1 if it is unset; that is a default, not the user's choice.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "GPTCTL_NODE" not in os.environ
    given_by_torchrun = os.environ.get("OMP_NUM_THREADS") == "1" and by_torchrun
    if "OMP_NUM_THREADS" not in os.environ or given_by_torchrun:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))


def tell(findings: Iterable[Finding], log: Log) -> None:
    """Log what is worth knowing about the config."""
    for finding in findings:
        say = log.info if finding.level == "notice" else log.warn
        say("\n".join(filter(None, [str(finding), _hint(finding.hint)])))


def print_error(error: UserError) -> None:
    """Print an error to stderr, and write it to the error file that torchrun reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank = os.environ.get("RANK", "0")
    prefix = f"rank {rank}: " if rank.isdecimal() and rank != "0" else ""
    lines = [
        line for finding in error.findings for line in (f"{prefix}{finding}", _hint(finding.hint))
    ]
    lines += [f"{prefix}error: {error.message}", _hint(error.hint)]
    # All ranks of a node have the same config, so only one of them prints its findings.
    if not error.findings or os.environ.get("LOCAL_RANK", "0") == "0":
        print(*filter(None, lines), sep="\n", file=sys.stderr)
    get_error_handler().record_exception(error)


def _hint(text: str) -> str:
    return f"hint: {text}" if text else ""
