"""Work on several hosts at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_PARALLEL = 32  # threads: each of them waits for a host most of the time

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(
    work: Callable[[T], R], items: Sequence[T], most: int = MAX_PARALLEL
) -> list[R | Exception]:
    """Return the result for each item, or the exception that was raised for it, in order."""

    # One host that fails must not hide the results of the others.
    def guarded(item: T) -> R | Exception:
        try:
            return work(item)
        except Exception as error:
            return error

    with ThreadPoolExecutor(min(most, max(1, len(items)))) as pool:
        return list(pool.map(guarded, items))
