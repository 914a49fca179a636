"""The error that all code for one host raises, and the one for several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gptctl.engine.error_text import one_line
from gptctl.text import count
from trainer.errors import OUT_OF_REACH, Rule, UserError

USABLE = Rule("S010", "every host of a job must be reachable and usable when the job starts")

SHORTEST_WAIT = 0.5  # seconds: a host that gets less could look silent
NOT_ASKED = "gptctl had no time left to ask it"
LONGEST = 2000  # characters; a message may name several files
R = TypeVar("R")


class HostError(UserError):
    """A host cannot be used. `is_lost`: the connection failed, and a later try may succeed.

    `is_silent`: it was waited for as long as it may be silent, and need not be asked again.
    """

    def __init__(
        self, host: str, what: str, hint: str = "", is_lost: bool = False, is_silent: bool = False
    ) -> None:
        # One line: much of it comes from the host, which must not be able to forge our hints.
        what = one_line(what, LONGEST)
        # `what` stays available without the name: tables show the host in a column of its own.
        super().__init__(f"{host}: {what}", hint, OUT_OF_REACH)
        self.host, self.detail, self.is_lost = host, what, is_lost
        self.is_silent = is_silent


def silent_host(host: str, seconds: float) -> HostError:
    """The error for a host that did not answer in time."""
    # The command has little time, and this machine is busy: that says nothing of the host.
    if seconds < SHORTEST_WAIT:
        return HostError(host, NOT_ASKED, "try again", is_lost=True, is_silent=True)
    problem = f"no answer in {seconds:.3g} s"
    hint = "if the host is only slow, increase `start_timeout` in the profile"
    return HostError(host, problem, hint, is_lost=True, is_silent=True)


def shell_error(host: str, stderr: str) -> HostError:
    """The error for a login shell that exited before it ran our command."""
    said = f": {last[-1]}" if (last := stderr.strip().splitlines()) else ""
    hint = "check ~/.bashrc or the like there: it must not exit or start another program"
    return HostError(host, f"its login shell did not run the command{said}", hint)


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
