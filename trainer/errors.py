"""What goes wrong for a user: rules, findings, and the one exception that ends a command.

A `Rule` stands beside the code that checks it and makes `Finding`s; a `UserError` carries them to the top, where it is
caught once. This module knows neither YAML nor terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Level = Literal["error", "warning", "notice"]

ANSWER_IS_NO = 1
WRONG_USAGE = 2
OUT_OF_REACH = 3


class Place(NamedTuple):
    """Where a value was written: a file and line, or a flag (line 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Finding(NamedTuple):
    """One mistake or doubt: which rule, where, what value, what is wrong, and the smallest change that mends it."""

    code: str
    level: Level
    rule: str
    key: str
    message: str
    hint: str = ""
    value: Any = None
    place: Place | None = None
    uses: tuple[str, ...] = ()

    def at(self, place: Place | None) -> Finding:
        """The same finding with a place, unless it has one already."""
        return self if self.place or not place else self._replace(place=place)

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        subject = f"{self.key}{where}".strip()
        return f"{self.level}: {self.code} {subject + ': ' if subject else ''}{self.message}"

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "level": self.level,
            "file": self.place.file if self.place else None,
            "line": (self.place.line or None) if self.place else None,
            "key": self.key or None,
            "value": self.value,
            "message": self.message,
            "rule": self.rule,
            "hint": self.hint or None,
        }


class Rule(NamedTuple):
    """A rule with a code that never changes its meaning.

    `uses` names the keys it looks at: where one of them could not be read, the rule keeps silent.
    """

    code: str
    text: str
    level: Level = "error"
    uses: tuple[str, ...] = ()

    def found(
        self, key: str, value: Any, message: str, hint: str = "", place: Place | None = None
    ) -> Finding:
        return Finding(
            self.code, self.level, self.text, key, message, hint, value, place, self.uses
        )

    def using(self, *keys: str) -> Rule:
        """The same rule where it looks at these keys only."""
        return self._replace(uses=keys)


class UserError(Exception):
    """A mistake of the user's: a message, a hint and an exit code; never shown with a traceback."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        exit_code: int = ANSWER_IS_NO,
        findings: Iterable[Finding] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.findings = tuple(findings)

    def as_json(self) -> dict[str, Any]:
        findings = [finding.as_json() for finding in self.findings]
        return {"error": self.message, "hint": self.hint or None, "findings": findings}


def errors_in(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then as they stand in the files."""
    levels = ("error", "warning", "notice")

    def position(finding: Finding) -> tuple[int, str, int]:
        place = finding.place or Place("")
        return (levels.index(finding.level), place.file, place.line)

    return tuple(sorted(findings, key=position))


def closest(word: str, known: Iterable[str], likeness: float = 0.7) -> list[str]:
    """The known word nearest to a misspelt one, if any is near; letter case does not count."""
    from difflib import get_close_matches  # slow to import, needed only for mistakes

    by_folded = {name.lower(): name for name in known}
    return [
        by_folded[match] for match in get_close_matches(word.lower()[:100], by_folded, 1, likeness)
    ]


def one_of(choices: Sequence[object]) -> str:
    """`1, 2 or 4`"""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
