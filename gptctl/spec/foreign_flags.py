"""Flags of other programs: how they are split, and what is left without a counterpart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from gptctl.spec.shell_text import is_known
from trainer.config import Override


class Flag(NamedTuple):
    """`--name value …` of a command line; the name without dashes, with `-` for `_`."""

    name: str
    values: tuple[str, ...]
    typed: str  # the flag as the user wrote it, without its values

    @property
    def value(self) -> str:
        return " ".join(self.values)

    @property
    def source(self) -> str:
        """The origin of the keys that the flag sets."""
        return f"{self.typed} {self.value}".strip()

    @property
    def is_known(self) -> bool:
        """Whether all its values are in the text, and none only when a shell runs."""
        return all(map(is_known, self.values))

    @property
    def number(self) -> int | None:
        """Its value as a positive integer; None if it is anything else."""
        digits = without_underscores(self.value)
        is_number = digits.isascii() and digits.isdigit() and len(digits) < 19
        return int(digits) or None if is_number else None


class Unmapped(NamedTuple):
    """A flag, variable or line that has no counterpart here, and why."""

    what: str
    reason: str

    @property
    def is_set(self) -> bool:
        """Whether it did set a key, but not with the same meaning."""
        return self.reason.startswith("set as ")


class Mapped(NamedTuple):
    """What became of some flags."""

    overrides: list[Override]
    unmapped: list[Unmapped]


NO_COUNTERPART = "no counterpart"
NOT_KNOWN = "its value is known only when a shell runs the script"


def without_underscores(text: str) -> str:
    """A number without the underscores that Python accepts in it, such as 146_484_375."""
    return text.replace("_", "") if re.fullmatch(r"[0-9]+(_[0-9]+)+", text) else text


def set_key(key: str, value: str, source: str) -> Override:
    return Override(key, value, source, verbatim=True)


def split_flags(words: Sequence[str], switches: Collection[str] = ()) -> Iterator[Flag]:
    """Split words into flags with all words that follow them; `switches` take no value."""
    at = 0
    while at < len(words):
        typed, equals, value = words[at].partition("=")
        at += 1
        # A word without a flag before it: a value of its own, such as `16` in `16 --lr 1`.
        if not is_flag(typed):
            yield Flag("", (words[at - 1],), "")
            continue
        name = typed.lstrip("-").replace("_", "-")
        values = [value] if equals else []
        while not equals and name not in switches and at < len(words) and not is_flag(words[at]):
            values.append(words[at])
            at += 1
        yield Flag(name, tuple(values), typed)


def is_flag(word: str) -> bool:
    """Whether a word begins with a dash and is not a negative number."""
    return word[:1] == "-" and not (word[1:2].isdigit() or word[1:2] == ".") and word not in "--"
