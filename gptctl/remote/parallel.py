"""Work on several hosts at the same time, and report the problems of all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gptctl.remote.host_error import HostError
from gptctl.text import count
from trainer.errors import OUT_OF_REACH, Rule, UserError

MAX_PARALLEL = 32  # threads: each of them waits for a host most of the time

USABLE = Rule("S010", "every host of a job must be reachable and usable when the job starts")

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


def all_or_none(results: Sequence[R | Exception], prefix: str = "", hint: str = "") -> list[R]:
    """Return the results if all hosts succeeded; else raise one error with all their problems."""
    errors = [result for result in results if isinstance(result, HostError)]
    # Any other exception is not a problem of a host.
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, HostError):
            raise result
    if errors:
        found = [USABLE.found(error.host, None, error.what, error.hint) for error in errors]
        message = f"{prefix}{count(len(errors), 'host')} cannot be used"
        raise UserError(message, hint, OUT_OF_REACH, found)
    return [result for result in results if not isinstance(result, Exception)]
