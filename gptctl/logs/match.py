"""Which lines of a block are wanted: all, those that match an expression, those that look like errors.

A matcher takes a block of whole lines and gives the bounds of the wanted ones. Big blocks are searched as a whole
for bytes that a wanted line must hold; only lines around a hit are looked at.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from trainer.errors import WRONG_USAGE, UserError

Span = tuple[int, int]  # start and end of a line in its block, without the newline
SPARSE = 2000  # bytes per hit from which it pays to look at the lines of the hits one by one

# Where a line ends changes what these find, so that they must see each line alone: \A \Z (?!…) (?<!…) (?>…) x++
_NEEDS_LINES = re.compile(r"\\[AZz]|\(\?<?!|\(\?>|\(\?\(|[*+?}]\+|\(\?[a-zA-Z]*-")


def every_line(block: bytes, start: int = 0) -> Iterator[Span]:
    last = len(block)
    while start < last:
        end = block.find(b"\n", start)
        if end < 0:
            end = last
        yield start, end
        start = end + 1


def lines_with(block: bytes, needles: Iterable[bytes]) -> Iterator[Span]:
    """The lines that hold any of the needles, each once; a needle may begin with the newline before it."""
    hits = {needle: hit for needle in needles if (hit := block.find(needle)) >= 0}
    while hits:
        needle = min(hits, key=hits.__getitem__)
        start, end = _line_at(block, hits[needle] + needle.startswith(b"\n"))
        yield start, end
        for needle in [needle for needle, hit in hits.items() if hit < end]:
            hits[needle] = block.find(needle, end)
            if hits[needle] < 0:
                del hits[needle]


def _line_at(block: bytes, position: int) -> Span:
    end = block.find(b"\n", position)
    return block.rfind(b"\n", 0, position) + 1, len(block) if end < 0 else end


class Grep:
    """A Python regular expression over raw bytes; a match lies within one line, whose bounds are `^` and `$`."""

    def __init__(self, pattern: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what later Pythons will read otherwise
                self._regex = re.compile(pattern.encode("utf-8", "surrogateescape"), re.MULTILINE)
                self._needles = _needles(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            at = (
                f" at character {error.pos + 1}"
                if isinstance(error, re.error) and error.pos is not None
                else ""
            )
            what = error.msg if isinstance(error, re.error) else "the expression is too big"
            raise UserError(
                f"--grep {pattern[:100]!r}{at}: {what}",
                "it is a Python regular expression; put \\ before a character that stands for itself",
                WRONG_USAGE,
            ) from None
        self._by_line = bool(_NEEDS_LINES.search(pattern))

    def __call__(self, block: bytes) -> Iterator[Span]:
        present = [needle for needle in self._needles if needle in block]
        if self._needles and not present:
            return iter(())
        if self._needles and sum(map(block.count, present)) * SPARSE < len(block):
            return self._among(block, lines_with(block, present))
        return self._among(block, every_line(block)) if self._by_line else self._anywhere(block)

    def has(self, line: bytes) -> bool:
        return self._regex.search(line) is not None

    def _among(self, block: bytes, spans: Iterable[Span]) -> Iterator[Span]:
        search = self._regex.search
        return ((start, end) for start, end in spans if search(block[start:end]))

    def _anywhere(self, block: bytes) -> Iterator[Span]:
        """Searches across lines; what is found may span two of them, so its first line is searched again alone."""
        last = len(block) - block.endswith(b"\n")
        position, search = 0, self._regex.search
        while position <= last:
            found = search(block, position, last)
            if not found:
                return
            start, end = _line_at(block, found.start())
            if search(block[start:end]):
                yield start, end
            position = end + 1


def _needles(pattern: str) -> tuple[bytes, ...]:
    """Bytes of which every match must hold at least one; none if the expression does not say."""
    try:
        parser = importlib.import_module(
            "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
        )
        parsed = parser.parse(pattern.encode("utf-8", "surrogateescape"), re.MULTILINE)
        return () if parsed.state.flags & re.IGNORECASE else _needed(parsed)
    except (
        ImportError,
        AttributeError,
        TypeError,
        ValueError,
    ):  # not a public part of Python: do without
        return ()


def _needed(parsed: Any) -> tuple[bytes, ...]:
    """The most telling choice of needles: the longest run of plain bytes, or one for each side of a `|`."""
    best: tuple[bytes, ...] = ()
    run = b""
    for operation, argument in [*parsed, ("END", None)]:
        found: tuple[bytes, ...] = ()
        if str(operation) == "LITERAL":
            run += bytes([argument])
            continue
        if run:
            best = max(best, (run,), key=_worth)
            run = b""
        if str(operation) == "SUBPATTERN" and not argument[1] & re.IGNORECASE:
            found = _needed(argument[3])
        elif str(operation) in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0:
            found = _needed(argument[2])
        elif str(operation) == "BRANCH":
            sides = [_needed(side) for side in argument[1]]
            found = (
                tuple(needle for side in sides for needle in side)
                if all(sides) and len(sides) <= 8
                else ()
            )
        best = max(best, found, key=_worth)
    return best


def _worth(needles: tuple[bytes, ...]) -> int:
    return min((len(needle) for needle in needles), default=0)


_ERROR = re.compile(
    rb"\b(?:ERROR|FATAL|CRITICAL)\b|\b\w*(?:Error|Exception)\b|\berror:|NCCL WARN|Fatal Python error"
    rb"|CUDA error|[Oo]ut [Oo]f [Mm]emory|oom-kill|\bKilled\b|Segmentation fault|Bus error|core dumped|\b[Ss]ignal:? \d"
    rb"|death signal|\bSIG(?:KILL|TERM|SEGV|ABRT|BUS|ILL|FPE|INT|HUP)\b|\bloss[:=]? *[-+]?(?:nan|inf)\b"
    rb"|^(?:\[rank\d+\]: ?)?\[?[EF]\d{4} \d\d:\d\d:\d\d"
)
_ERROR_NEEDLES = (  # every match of _ERROR holds one of them
    *b"ERROR FATAL CRITICAL rror Exception Killed oom-kill ignal SIG nan inf [E0 [E1 [F0 [F1 \nE \nF".split(
        b" "
    ),
    *(b"NCCL WARN", b"f memory", b"f Memory", b"egmentation fault", b"core dumped", b"Traceback ("),
)
_TRACEBACK = b"Traceback (most recent call last)"
_RANK = re.compile(rb"\[rank\d+\]: ?")  # torch puts it before every line of a traceback


class Errors:
    """Lines that look like errors, and tracebacks as a whole: keeps in mind whether the last block ended in one."""

    def __init__(self) -> None:
        self._in_traceback = False

    def __call__(self, block: bytes) -> Iterator[Span]:
        done = 0  # everything before it is decided
        if self._in_traceback:
            for span in self._traceback(block, 0):
                yield span
                done = span[1] + 1
        for start, end in chain([_line_at(block, 0)], lines_with(block, _ERROR_NEEDLES)):
            line = block[start:end]
            if start < done:
                continue
            if _TRACEBACK in line:
                for span in self._traceback(block, start):
                    yield span
                    done = span[1] + 1
            elif _ERROR.search(line):
                yield start, end
                done = end + 1

    def _traceback(self, block: bytes, position: int) -> Iterator[Span]:
        """Its head and what is indented, up to and with the first line that is not: the exception."""
        self._in_traceback = True
        for start, end in every_line(block, position):
            yield start, end
            line = _RANK.sub(b"", block[start:end], 1)
            if line[:1] not in (b" ", b"\t") and _TRACEBACK not in line:
                self._in_traceback = False
                return
