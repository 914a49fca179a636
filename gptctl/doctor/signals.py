"""Signals that ask gptctl to exit: they make it clean up, and never interrupt the clean-up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay signals until the block ends, in gptctl and in the commands that it starts."""
    received: list[int] = []

    def record(number: int, _: object) -> None:
        received.append(number)

    # The mask is for children, which inherit it. It does not hold for other threads, such as those
    # of ssh connections: a signal that reaches one of them runs the handler of this one.
    handlers = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    replaced = {number: handler for number, handler in handlers.items() if callable(handler)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
    for number in replaced:
        signal.signal(number, record)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(received):
            signal.raise_signal(late)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that `finally` blocks run."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # nohup, for example, has its reasons to ignore SIGHUP
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
