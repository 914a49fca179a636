"""Select the lines of a block: all, those that match an expression, or those that look like errors.

A matcher takes a block of whole lines and returns the bounds of the selected ones. For speed, it
searches the whole block for bytes that a match must contain, and examines only lines around a hit.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from gptctl.logs.needles import Needles
from trainer.errors import WRONG_USAGE, UserError

Span = tuple[int, int]  # start and end of a line in its block, without the newline
SPARSE = 2000  # bytes per hit; with fewer hits, examining only their lines is faster

# The end of a line changes what these match, so they must search each line alone:
# \A \Z (?!…) (?<!…) (?>…) x++
_NEEDS_LINES = re.compile(r"\\[AZz]|\(\?<?!|\(\?>|\(\?\(|[*+?}]\+|\(\?[a-zA-Z]*-")


def every_line(block: bytes, start: int = 0) -> Iterable[Span]:
    end = block.find(b"\n", start)
    # A generator would cost more than the line that a followed file usually has.
    return [(start, end)] if end == len(block) - 1 >= start else _each_line(block, start)


def _each_line(block: bytes, start: int) -> Iterator[Span]:
    last = len(block)
    while start < last:
        end = block.find(b"\n", start)
        if end < 0:
            end = last
        yield start, end
        start = end + 1


def lines_with(block: bytes, needles: Iterable[bytes]) -> Iterator[Span]:
    """Find the lines with any of the needles, each once, in order.

    A needle may start with the newline before its line.
    """
    # The next hit of each needle; the smallest is the next line.
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
    """A Python regular expression over raw bytes. It matches within one line."""

    def __init__(self, pattern: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # syntax that later Pythons will read differently
                # MULTILINE: ^ and $ match at the ends of each line of a block.
                self._regex = re.compile(pattern.encode("utf-8", "surrogateescape"), re.MULTILINE)
                conditions = _conditions(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            at = (
                f" at character {error.pos + 1}"
                if isinstance(error, re.error) and error.pos is not None
                else ""
            )
            what = error.msg if isinstance(error, re.error) else "the expression is too large"
            raise UserError(
                f"--grep {pattern[:100]!r}{at}: {what}",
                "use a Python regular expression; escape special characters with \\",
                WRONG_USAGE,
            ) from None
        self._needles = conditions[0] if conditions else ()
        self._conditions = [Needles(needles) for needles in conditions]
        self._by_line = bool(_NEEDS_LINES.search(pattern))

    def __call__(self, block: bytes) -> Iterator[Span]:
        # Needles are found at memory speed; a regular expression is many times slower.
        found = []
        for needles in self._conditions:
            found.append(needles.present(block))
            if not found[-1]:
                return iter(())
        for present in found:
            if sum(map(block.count, present)) * SPARSE < len(block):
                return self._among(block, lines_with(block, present))
        return self._among(block, every_line(block)) if self._by_line else self._anywhere(block)

    def has(self, line: bytes) -> bool:
        return self._regex.search(line) is not None

    def _among(self, block: bytes, spans: Iterable[Span]) -> Iterator[Span]:
        search = self._regex.search
        return ((start, end) for start, end in spans if search(block[start:end]))

    def _anywhere(self, block: bytes) -> Iterator[Span]:
        """Search the block as one text, which saves a call per line."""
        # A match may span two lines, so its first line is searched again alone.
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


def _conditions(pattern: str) -> list[tuple[bytes, ...]]:
    """Find sets of byte strings: every match contains at least one of each set. Best set first."""
    try:
        parser = importlib.import_module(
            "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
        )
        parsed = parser.parse(pattern.encode("utf-8", "surrogateescape"), re.MULTILINE)
        found = [] if parsed.state.flags & re.IGNORECASE else list(_needed(parsed))
    # The parser is not a public part of Python: without it, search without needles.
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return sorted(found, key=_worth, reverse=True)


def _needed(parsed: Any) -> Iterator[tuple[bytes, ...]]:
    """Find the literals of an expression, and sets of one for each side of a `|`."""
    run = b""
    for operation, argument in [*parsed, ("END", None)]:
        if str(operation) == "LITERAL":
            run += bytes([argument])
            continue
        if run:
            yield (run,)
            run = b""
        if str(operation) == "SUBPATTERN" and not argument[1] & re.IGNORECASE:
            yield from _needed(argument[3])
        elif str(operation) in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0:
            yield from _needed(argument[2])
        elif str(operation) == "BRANCH":
            # Each side needs a needle of its own. With many sides the search would be slower.
            sides = [max(_needed(side), key=_worth, default=()) for side in argument[1]]
            if all(sides) and len(sides) <= 8:
                yield tuple(needle for side in sides for needle in side)


def _worth(needles: tuple[bytes, ...]) -> int:
    # The shortest needle has the most hits, so it decides the speed.
    return min((len(needle) for needle in needles), default=0)


_ERROR = re.compile(
    rb"\b(?:ERROR|FATAL|CRITICAL)\b|\b\w*(?:Error|Exception)\b|\berror:|NCCL WARN"
    rb"|Fatal Python error|CUDA error|[Oo]ut [Oo]f [Mm]emory|oom-kill|\bKilled\b"
    rb"|Segmentation fault|Bus error|core dumped|\b[Ss]ignal:? \d|death signal"
    rb"|\bSIG(?:KILL|TERM|SEGV|ABRT|BUS|ILL|FPE|INT|HUP)\b|\bloss[:=]? *[-+]?(?:nan|inf)\b"
    rb"|^(?:\[rank\d+\]: ?)?\[?[EF]\d{4} \d\d:\d\d:\d\d"
)
# Every match of _ERROR contains one of them.
_ERROR_NEEDLES = (
    *b"ERROR FATAL CRITICAL rror Exception Killed oom-kill ignal SIG nan inf".split(),
    *(b"[E0", b"[E1", b"[F0", b"[F1", b"\nE", b"\nF"),
    *(b"NCCL WARN", b"f memory", b"f Memory", b"egmentation fault", b"core dumped", b"Traceback ("),
)
_TRACEBACK = b"Traceback (most recent call last)"
_RANK = re.compile(rb"\[rank\d+\]: ?")  # torch adds it to every line of a traceback


class Errors:
    """Selects lines that look like errors, and whole tracebacks, even across blocks."""

    def __init__(self) -> None:
        self._in_traceback = False
        self._needles = Needles(_ERROR_NEEDLES)

    def __call__(self, block: bytes) -> Iterator[Span]:
        done = 0  # lines before this offset are decided
        if self._in_traceback:
            for span in self._traceback(block, 0):
                yield span
                done = span[1] + 1
        # The first line has no newline before it, which the needles for glog need.
        hits = lines_with(block, self._needles.present(block))
        for start, end in chain([_line_at(block, 0)], hits):
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
        """Select its first line, the indented lines, and the exception, which ends it."""
        self._in_traceback = True
        for start, end in every_line(block, position):
            yield start, end
            line = _RANK.sub(b"", block[start:end], 1)
            if line[:1] not in (b" ", b"\t") and _TRACEBACK not in line:
                self._in_traceback = False
                return
