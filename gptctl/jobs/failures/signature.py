"""A kind of failure that gptctl knows: how it is recognised, what it usually means, and the fix."""

from __future__ import annotations

from typing import NamedTuple


class Signature(NamedTuple):
    """One kind of failure. Its code never changes its meaning.

    A pattern is searched in each line by itself. Repetitions in it are bounded (`.{0,80}`), so that
    no line, however hostile, makes the search slow.
    """

    code: str
    title: str
    cause: str  # the likely cause, one sentence
    fix: str  # what to change, in one line
    patterns: tuple[str, ...] = ()
    # To type; {job}, {node}, {host}, {rank} and {cluster} are filled in.
    commands: tuple[str, ...] = ()
    exits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    states: tuple[str, ...] = ()  # of the job; such a state explains the end by itself
    # It tells how the failure was noticed, not why: any other signature explains more.
    is_general: bool = False
    trainer_fix: str = ""  # instead of `fix`, for the bundled trainer

    def fix_for(self, is_trainer: bool) -> str:
        return (is_trainer and self.trainer_fix) or self.fix
