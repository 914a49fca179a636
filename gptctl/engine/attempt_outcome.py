"""How an attempt ended: state, reason, first failure, and exit codes that nodes did not record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from gptctl.engine.atomic_files import replacing
from gptctl.engine.cause import Cause, cause_from, first_cause
from gptctl.engine.contract import OUTCOME
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import read_json
from gptctl.engine.node import NodeExit
from gptctl.engine.run_folder import FAILED, LONGEST_REASON, Result, RunFolder


def failed_attempt(exits: Iterable[NodeExit], hosts: tuple[str, ...]) -> Result | None:
    """The result of an attempt that failed, with its first failure; None if no node knows one."""
    # A node that the supervisor stopped is a consequence of another one.
    cause = first_cause(end.cause for end in exits if end.cause and not end.was_stopped)
    if cause is None:
        return None
    if cause.rank is None and cause.node < len(hosts):
        cause = cause._replace(host=hosts[cause.node])
    return Result(FAILED, cause.reason(hosts), 0.0, cause)


def without_progress(last: Result | None) -> Result:
    """The result of a job whose attempts save no checkpoint; `last`: how the last one ended."""
    reason = f"{last.reason}; " if last and last.reason else ""
    failure: Cause | None = last.failure if last else None
    return Result(FAILED, f"{reason}three attempts without a new checkpoint", 0.0, failure)


def record_outcome(
    folder: RunFolder, attempt: int, result: Result, exits: Mapping[int, NodeExit]
) -> None:
    """Record how an attempt ended, and the exit codes of nodes that recorded none."""
    recorded = folder.exit_codes(attempt, exits)
    stopped = {str(node): end.code for node, end in exits.items() if node not in recorded}
    with replacing(folder.attempt(attempt) / OUTCOME) as stream:
        stream.write(json.dumps({**result.as_json(), "exits": stopped}).encode())


def outcome_of(folder: RunFolder, attempt: int) -> Result | None:
    """Return how an attempt ended, if the supervisor recorded it."""
    found = read_json(folder.attempt(attempt) / OUTCOME) or {}
    state, reason = found.get("state"), found.get("reason")
    if not isinstance(state, str) or not isinstance(reason, str):
        return None
    return Result(state, one_line(reason, LONGEST_REASON), 0.0, cause_from(found.get("failure")))


def stopped_nodes(folder: RunFolder, attempt: int) -> dict[int, int]:
    """Return the exit codes of nodes that the supervisor had to stop: they recorded none."""
    exits = (read_json(folder.attempt(attempt) / OUTCOME) or {}).get("exits")
    pairs = exits.items() if isinstance(exits, dict) else ()
    # A host of an ssh job may have sent this file.
    return {
        int(node): code
        for node, code in pairs
        if node.isdecimal() and len(node) < 8 and type(code) is int
    }
