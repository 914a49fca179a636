"""The error that all code for one host raises, and the one for several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gptctl.text import count
from trainer.errors import OUT_OF_REACH, Rule, UserError

USABLE = Rule("S010", "every host of a job must be reachable and usable when the job starts")

R = TypeVar("R")


class HostError(UserError):
    """A host cannot be used. `is_lost`: the connection failed, and a later try may succeed."""

    def __init__(self, host: str, what: str, hint: str = "", is_lost: bool = False) -> None:
        # `what` stays available without the name: tables show the host in a column of its own.
        super().__init__(f"{host}: {what}", hint, OUT_OF_REACH)
        self.host, self.detail, self.is_lost = host, what, is_lost


def all_or_none(results: Sequence[R | Exception], prefix: str = "", hint: str = "") -> list[R]:
    """Return the results if all hosts succeeded; else raise one error with all their problems."""
    errors = [result for result in results if isinstance(result, HostError)]
    # Any other exception is not a problem of a host.
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, HostError):
            raise result
    if errors:
        found = [USABLE.found(error.host, None, error.detail, error.hint) for error in errors]
        message = f"{prefix}{count(len(errors), 'host')} cannot be used"
        raise UserError(message, hint, OUT_OF_REACH, found)
    return [result for result in results if not isinstance(result, Exception)]
