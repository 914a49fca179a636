"""What ranks tell each other when one of them may be stuck: how far they are, and why to stop.

Anybody who reaches the store can write such a message, so each field is checked before its use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, UserError


class Answer(NamedTuple):
    """How far a rank is."""

    rank: int
    ticks: int
    where: str
    idle: float  # seconds since the last tick
    waits: bool  # whether it waits for other ranks, judging by its stack


class Verdict(NamedTuple):
    """Why the job stops. The first verdict of any rank counts for all ranks."""

    reason: str
    hint: str
    culprits: Sequence[int] = ()
    is_silent: bool = False  # the culprits do not respond, so others have to kill them
    code: int = OUT_OF_REACH  # exit code of the other ranks

    @property
    def error(self) -> UserError:
        return UserError(
            self.reason, self.hint, OUT_OF_REACH if self.code == OUT_OF_REACH else ANSWER_IS_NO
        )


def answer_in(message: Mapping[str, Any], world: int) -> Answer | None:
    """The answer in a message, or None if it is not one."""
    if message.keys() != set(Answer._fields):
        return None
    rank, ticks, where, idle, waits = (message[name] for name in Answer._fields)
    is_valid = (
        _is_rank(rank, world)
        and type(ticks) is int
        and isinstance(where, str)
        and type(idle) in (int, float)
        and math.isfinite(idle)
        and type(waits) is bool
    )
    return Answer(rank, ticks, where, idle, waits) if is_valid else None


def verdict_in(message: Mapping[str, Any], world: int) -> Verdict | None:
    """The verdict in a message, or None if it is not one."""
    if message.keys() != set(Verdict._fields):
        return None
    reason, hint, culprits, is_silent, code = (message[name] for name in Verdict._fields)
    is_valid = (
        isinstance(reason, str)
        and isinstance(hint, str)
        and isinstance(culprits, (list, tuple))
        and all(_is_rank(rank, world) for rank in culprits)
        and type(is_silent) is bool
        and type(code) is int
        and 0 < code < 256
    )
    return Verdict(reason, hint, culprits, is_silent, code) if is_valid else None


def _is_rank(value: object, world: int) -> bool:
    return type(value) is int and 0 <= value < world
