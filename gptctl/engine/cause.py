"""The first failure of an attempt: which rank or node failed, and why.

It is found once, where the logs are, and recorded; everybody else reads the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.engine.contract import OUTCOME
from gptctl.engine.error_text import LONGEST, one_line, signal_name

LONGEST_NAME = 100  # characters of a host name


class Cause(NamedTuple):
    """Why an attempt failed. `rank` is None if a node failed before or without a rank."""

    text: str  # one line
    node: int
    rank: int | None = None
    host: str = ""
    exit: int | None = None
    signal: int | None = None
    time: float | None = None  # when it exited, if that is known
    # It failed as processes do when another one has failed, which may have left no record.
    is_consequence: bool = False

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
    """Choose the first failure of several nodes."""
    return min(causes, key=_order, default=None)


def _order(cause: Cause) -> tuple[bool, float, int]:
    never = float("inf")
    return cause.is_consequence, never if cause.time is None else cause.time, cause.node


def cause_from(fields: Any) -> Cause | None:
    """Read the JSON of a cause, which another host may have sent; None if it is not one."""
    match fields:
        case {"cause": str(text), "node": int(node)}:
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
            return safe._replace(is_consequence=named.is_consequence is True) if safe else None
    return None


def recorded_rank(records: Mapping[str, bytes]) -> int | None:
    """Return the rank that failed first, if the records of an attempt name one."""
    try:
        outcome = json.loads(records.get(OUTCOME, b""))
    except (ValueError, RecursionError):
        return None
    found = cause_from(outcome.get("failure")) if isinstance(outcome, dict) else None
    return found.rank if found else None


def name_of(node: int, hosts: Sequence[str]) -> str:
    return f"node {node} ({hosts[node]})" if node < len(hosts) else f"node {node}"


def _number(value: Any) -> int | None:
    is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return value if is_valid else None


def _time(value: Any) -> float | None:
    is_valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e11
    return float(value) if is_valid else None
