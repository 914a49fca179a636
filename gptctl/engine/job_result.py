"""How a job ended: the states, and the content of result.json. Does not know where files are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gptctl.engine.cause import Cause, cause_from
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import is_time, is_whole
from gptctl.engine.launch_plan import MOST_NODES

COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"
TIMEOUT, STOPPED = "TIMEOUT", "STOPPED"
LOST, UNKNOWN, PENDING, RUNNING = "LOST", "UNKNOWN", "PENDING", "RUNNING"
# Only a scheduler reports these.
OUT_OF_MEMORY, PREEMPTED, NODE_FAIL = "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL"
# States in which gptctl does not wait for the job any longer.
FINAL = (COMPLETED, FAILED, CANCELLED, TIMEOUT, STOPPED, LOST, OUT_OF_MEMORY, PREEMPTED, NODE_FAIL)
LONGEST_REASON = 500  # characters


class Result(NamedTuple):
    """How a job ended."""

    state: str  # one of FINAL
    reason: str = ""
    ended: float = 0.0  # seconds since the epoch
    failure: Cause | None = None  # the first failure, if it is known
    # Nodes that did not confirm that nothing is left there; None: an older engine, not known.
    not_ended: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "failure": self.failure.as_json() if self.failure else None}


def parse_result(found: Mapping[str, Any] | None) -> Result | None:
    """Return the content of result.json, or None if it is missing or damaged."""
    # Hosts of an ssh job send this file: use nothing of it that has the wrong type.
    if not found or found.get("state") not in FINAL:
        return None
    reason, ended = found.get("reason"), found.get("ended")
    # One line: a host must not be able to forge rows of `gptctl list`.
    text = one_line(reason, LONGEST_REASON) if isinstance(reason, str) else ""
    when = ended if is_time(ended) else 0.0
    nodes = found.get("not_ended")
    left = None
    if isinstance(nodes, list):
        left = tuple(node for node in nodes if is_whole(node, 0, MOST_NODES))
    return Result(found["state"], text, when, cause_from(found.get("failure")), left)
