"""Work on several hosts at the same time."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from gptctl.deadline import Deadline

MAX_PARALLEL = 32  # threads: each of them waits for a host most of the time

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(
    work: Callable[[T], R],
    items: Sequence[T],
    most: int = MAX_PARALLEL,
    deadline: Deadline | None = None,
) -> list[R | Exception]:
    """Return the result for each item, or the exception that was raised for it, in order.

    An item that is not finished at the deadline gets a TimeoutError, and its thread is left alone.
    """
    waiting = deque(enumerate(items))
    results: dict[int, R | Exception] = {}

    def run() -> None:
        while waiting:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            # One host that fails must not hide the results of the others.
            try:
                results[number] = work(item)
            except Exception as error:
                results[number] = error

    # Daemons: neither Ctrl-C nor the end of gptctl waits for a host that does not answer.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(most, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        left = deadline.left if deadline else math.inf
        thread.join(min(left, threading.TIMEOUT_MAX))
    return [results.get(number, TimeoutError()) for number in range(len(items))]


def bounded(work: Callable[[], R], deadline: Deadline) -> R:
    """Return the result of something that has no timeout itself; raise TimeoutError if late."""
    (result,) = successful(in_parallel(lambda _: work(), [None], deadline=deadline))
    return result


def successful(results: Sequence[R | Exception]) -> list[R]:
    """Return the results; raise the first exception among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]
