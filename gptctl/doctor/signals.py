"""Signals that end a program: they undo what it has begun, and never come in the middle of that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait, and those for the clients too: they inherit it. There is one thread: no other hears."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal are as Ctrl-C: what was begun is undone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
