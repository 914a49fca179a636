"""User-facing problems: rules, findings, and the one exception that ends a command.

A `Rule` is defined next to the code that checks it, and creates `Finding`s. A `UserError` carries
them to the entry point, which catches it once. This module knows neither YAML nor terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from trainer.named_tuple import NamedTuple

Level = Literal["error", "warning", "notice"]

# Exit codes.
ANSWER_IS_NO = 1  # the command worked, and its result is negative: invalid config, failed job
WRONG_USAGE = 2  # the command line is wrong, as in other Unix programs
OUT_OF_REACH = 3  # a host, scheduler or other rank did not answer: trying again may help


class Place(NamedTuple):
    """Where a value was set: a file and line, or a flag (line 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Finding(NamedTuple):
    """One problem: which rule, where, what value, what is wrong, and the smallest fix."""

    code: str
    level: Level
    rule: str
    key: str
    message: str
    hint: str = ""
    value: Any = None
    place: Place | None = None
    uses: tuple[str, ...] = ()  # the keys that the rule depends on, see `Rule`

    def at(self, place: Place | None) -> Finding:
        """A copy with this place, unless the finding already has one."""
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
    """A rule with a stable code: scripts may rely on what a code means.

    `uses` names the keys that the rule depends on. If one of them could not be read, findings of
    the rule are dropped: they would only repeat the first mistake in other words.
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
        """A copy that depends on these keys instead."""
        return self._replace(uses=keys)


class UserError(Exception):
    """A user mistake: a message, a hint and an exit code. Never shown with a traceback."""

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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it wraps, each once: they can form a circle."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__


def errors_in(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings and notices; within a level by file and line."""
    levels = ("error", "warning", "notice")

    def position(finding: Finding) -> tuple[int, str, int]:
        place = finding.place or Place("")
        return (levels.index(finding.level), place.file, place.line)

    return tuple(sorted(findings, key=position))


def install_line(extra: str) -> str:
    """The command that adds an extra, from any folder: pip takes the gptctl that is installed."""
    return f"pip install 'gptctl[{extra}]'"


def closest(word: str, known: Iterable[str], likeness: float = 0.7) -> list[str]:
    """The known word most similar to a misspelt one, if any is similar. Ignores letter case."""
    from difflib import get_close_matches  # slow to import, and needed only after a mistake

    # Cut long words: the search takes quadratic time.
    by_folded = {name.lower(): name for name in known}
    return [
        by_folded[match] for match in get_close_matches(word.lower()[:100], by_folded, 1, likeness)
    ]


def one_of(choices: Sequence[object]) -> str:
    """Join choices as in `1, 2 or 4`."""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
