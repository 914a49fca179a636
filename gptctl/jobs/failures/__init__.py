"""Kinds of failure that gptctl knows, and the search for the likely one. Pure: texts in, data out.

How one of several is chosen: what the failure says of itself comes before the log of the rank that
failed first, that before the log of its node and of the scheduler, and that before the exit code or
signal. In each of them, the catalogue goes from the most specific to the most general. A general
signature, such as a timeout of NCCL, counts only if none of these has a specific one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gptctl.engine.error_text import one_line
from gptctl.jobs.failures.gpu_failures import SIGNATURES as OF_GPUS
from gptctl.jobs.failures.network_failures import SIGNATURES as OF_NETWORKS
from gptctl.jobs.failures.node_failures import SIGNATURES as OF_NODES
from gptctl.jobs.failures.program_failures import SIGNATURES as OF_PROGRAMS
from gptctl.jobs.failures.scheduler_failures import SIGNATURES as OF_SCHEDULERS
from gptctl.jobs.failures.scheduler_failures import UNMET
from gptctl.jobs.failures.signature import Signature

CATALOGUE: tuple[Signature, ...] = (
    *OF_GPUS,
    *OF_NETWORKS,
    *OF_SCHEDULERS,
    *OF_NODES,
    *OF_PROGRAMS,
)
MOST_LINES = 200  # at the end of a log: what is older was probably handled
LONGEST_LINE = 2000  # characters of a line that are searched
_PREFIX = re.compile(r"\[rank\d{1,7}\]: ?|rank \d{1,7}: (?=error: |hint: )")
# Healthy programs write such lines, too: NCCL looks for plugins, sockets try IPv6 first.
_NO_FAILURE = re.compile(
    r"\[[WI]\d{3,4} |.{0,200}(NCCL INFO\b|\b\w{0,40}Warning: |\bWARNING\b|\[ {0,8}INFO\])"
)
_ABOUT_DRIVER = "CUDA initialization"  # the one warning of torch that explains a failure
_HINT = re.compile(r"hint: (.+)")


class LogText(NamedTuple):
    """The end of a log."""

    where: str  # for people: `rank 3`
    text: str


class Evidence(NamedTuple):
    """What is known about the end of a job."""

    state: str
    said: str  # the first failure in one line, or the reason of the state
    logs: tuple[LogText, ...] = ()  # the nearest to the failure first
    exit: int | None = None
    signal: int | None = None


class LikelyCause(NamedTuple):
    """The signature that fits best, and what it was recognised by."""

    signature: Signature
    where: str
    line: str


def likely_cause(evidence: Evidence) -> LikelyCause | None:
    """Return the likely cause of a failure, or None if no signature fits."""
    return next(_matches(evidence), None)


def _matches(evidence: Evidence) -> Iterator[LikelyCause]:
    yield from _in_lines([UNMET], "the failure", [evidence.said[:LONGEST_LINE]])
    for each in CATALOGUE:
        if evidence.state in each.states:
            yield LikelyCause(each, "state", evidence.state)
    logs = [(log.where, lines_of(log.text)) for log in evidence.logs]
    sources = [("the failure", [evidence.said[:LONGEST_LINE]]), *logs]
    for is_general in (False, True):
        some = [each for each in CATALOGUE if each.is_general is is_general]
        for where, lines in sources:
            yield from _in_lines(some, where, lines)
        yield from _by_exit(some, evidence)


def _in_lines(
    signatures: Sequence[Signature], where: str, lines: Sequence[str]
) -> Iterator[LikelyCause]:
    for each in signatures:
        for pattern in each.patterns:
            # The last one: the failure is at the end of the log.
            line = next((line for line in reversed(lines) if re.search(pattern, line)), None)
            if line is not None:
                yield LikelyCause(each, where, one_line(line))


def _by_exit(signatures: Sequence[Signature], evidence: Evidence) -> Iterator[LikelyCause]:
    for each in signatures:
        if evidence.signal in each.signals:
            yield LikelyCause(each, "signal", str(evidence.signal))
        if evidence.exit in each.exits:
            yield LikelyCause(each, "exit code", str(evidence.exit))


def lines_of(text: str) -> list[str]:
    """The lines at the end of a log that may tell of a failure."""
    lines = (line[:LONGEST_LINE] for line in text.splitlines()[-MOST_LINES:])
    return [_PREFIX.sub("", line, count=1) for line in lines if _may_tell(line)]


def _may_tell(line: str) -> bool:
    return _ABOUT_DRIVER in line or not _NO_FAILURE.match(_PREFIX.sub("", line, count=1))


def own_hint(said: str, text: str) -> str:
    """Return the hint that a program printed after its error; empty if it printed none."""
    lines = lines_of(text)
    for number in reversed(range(len(lines) - 1)):
        found = _HINT.match(lines[number + 1])
        # Only the hint for this very error: there may be others in the log.
        if found and said[:80] in one_line(lines[number], LONGEST_LINE):
            return one_line(found[1], LONGEST_LINE)
    return ""
