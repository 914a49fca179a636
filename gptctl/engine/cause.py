"""The first failure of an attempt: which rank or node failed, and why.

It is found once, where the logs are, and recorded; everybody else reads the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.engine.contract import OUTCOME
from gptctl.engine.error_text import LONGEST, one_line, signal_name
from gptctl.engine.file_reading import is_time, is_whole, parse_json

LONGEST_NAME = 100  # characters of a host name
LARGEST_NUMBER = 1 << 31  # of a node, rank, exit code or signal; Linux has no larger ones
HOST_LOST = "its host is lost: "  # how the reason begins if a host disappeared


class Cause(NamedTuple):
    """Why an attempt failed. `rank` is None if a node failed before or without a rank."""

    text: str  # one line
    node: int
    rank: int | None = None
    host: str = ""
    exit: int | None = None
    signal: int | None = None
    time: float | None = None  # when it exited, by the clock of its host, if that is known
    # It failed as processes do when another one has failed, which may have left no record.
    is_consequence: bool = False
    # When it exited, by the steady clock of the machine that compares it with others.
    clock: float | None = None

    def reason(self, hosts: Sequence[str] = ()) -> str:
        """`rank 3 (node 1): RuntimeError: …`"""
        who = (
            name_of(self.node, hosts)
            if self.rank is None
            else f"rank {self.rank} (node {self.node})"
        )
        return f"{who}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "node": self.node,
            "host": self.host or None,
            "cause": self.text,
            "exit": self.exit,
            "signal": self.signal,
            "signal_name": None if self.signal is None else signal_name(self.signal),
            "time": self.time,
        }


def first_cause(causes: Iterable[Cause]) -> Cause | None:
    """Choose the first failure of several nodes, by the steady clock of this machine."""
    # Not by the time: clocks of hosts differ, and somebody may set them.
    return min(causes, key=_order, default=None)


def _order(cause: Cause) -> tuple[bool, float, int]:
    never = float("inf")
    return cause.is_consequence, never if cause.clock is None else cause.clock, cause.node


def relative_to_now(cause: Cause, now: float) -> Cause:
    """The cause as an agent sends it: `clock` is negative, in seconds before the message."""
    return cause if cause.clock is None else cause._replace(clock=min(0.0, cause.clock - now))


def on_clock_of_receiver(cause: Cause, now: float) -> Cause:
    """Undo that on the machine that received the message: two hosts have no clock in common."""
    return cause if cause.clock is None else cause._replace(clock=now + cause.clock)


def cause_from(fields: Any) -> Cause | None:
    """Read the JSON of a cause, which another host may have sent; None if it is not one."""
    match fields:
        case {"cause": str(text), "node": node} if is_whole(node, 0, LARGEST_NUMBER):
            host = fields.get("host")
            return Cause(
                one_line(text, 2 * LONGEST),
                node,
                _number(fields.get("rank")),
                one_line(host, LONGEST_NAME) if isinstance(host, str) else "",
                _number(fields.get("exit")),
                _number(fields.get("signal")),
                _time(fields.get("time")),
            )
    return None


def cause_in_message(fields: Any) -> Cause | None:
    """Read a cause that the agent of another host sent as a list."""
    match fields:
        case [str(), int(), *_] if len(fields) == len(Cause._fields):
            named = Cause(*fields)
            safe = cause_from({**named._asdict(), "cause": named.text})
            if safe is None:
                return None
            return safe._replace(
                is_consequence=named.is_consequence is True, clock=_moment_before(named.clock)
            )
    return None


def recorded_cause(records: Mapping[str, bytes]) -> Cause | None:
    """Return the first failure, if the records of an attempt name it."""
    return cause_from((parse_json(records.get(OUTCOME, b"")) or {}).get("failure"))


def name_of(node: int, hosts: Sequence[str]) -> str:
    return f"node {node} ({hosts[node]})" if node < len(hosts) else f"node {node}"


def _number(value: Any) -> int | None:
    return value if is_whole(value, 0, LARGEST_NUMBER) else None


def _moment_before(value: Any) -> float | None:
    """A negative number of seconds: what is reported has happened before."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and is_time(-value) else None


def _time(value: Any) -> float | None:
    return float(value) if is_time(value) else None
