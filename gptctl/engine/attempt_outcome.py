"""How an attempt ended: state, reason, first failure, and exit codes that nodes did not record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from gptctl.engine.atomic_files import replacing
from gptctl.engine.cause import Cause, cause_from, first_cause, name_of
from gptctl.engine.contract import OUTCOME
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import read_json
from gptctl.engine.job_result import FAILED, LONGEST_REASON, Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.node import NodeExit
from gptctl.engine.rank_owners import may_have_rank
from gptctl.engine.rank_runs import unrecorded_exits
from gptctl.engine.run_folder import RunFolder


def failed_attempt(
    exits: Iterable[NodeExit], hosts: tuple[str, ...], plan: LaunchPlan
) -> Result | None:
    """The result of an attempt that failed, with its first failure; None if no node knows one."""
    # A node that the supervisor stopped is a consequence of another one.
    cause = first_cause(end.cause for end in exits if end.cause and not end.was_stopped)
    if cause is None:
        return None
    # The host of the node sent it, and may name the rank of another one.
    if cause.rank is not None and not may_have_rank(cause.node, cause.rank, plan):
        cause = cause._replace(rank=None)
    if cause.rank is None and cause.node < len(hosts):
        cause = cause._replace(host=hosts[cause.node])
    return Result(FAILED, cause.reason(hosts), 0.0, cause)


def without_progress(last: Result | None) -> Result:
    """The result of a job whose attempts save no checkpoint; `last`: how the last one ended."""
    reason = f"{last.reason}; " if last and last.reason else ""
    failure: Cause | None = last.failure if last else None
    return Result(FAILED, f"{reason}three attempts without a new checkpoint", 0.0, failure)


def without_nodes(result: Result, lost: Sequence[int], hosts: Sequence[str]) -> Result | None:
    """The result of a job that lost nodes, which cannot join another attempt; None without any."""
    if not lost:
        return None
    names = ", ".join(name_of(node, hosts) for node in lost)
    return result._replace(reason=f"{result.reason}; not restarted after the loss of {names}")


def record_outcome(
    folder: RunFolder, attempt: int, result: Result, exits: Mapping[int, NodeExit]
) -> None:
    """Record how an attempt ended, and the exit codes of nodes that recorded none."""
    recorded = folder.exit_codes(attempt, exits)
    unrecorded = {node: end for node, end in exits.items() if node not in recorded}
    # On Slurm, srun stops the other nodes: launch.sh notes that it was asked to stop.
    stopped = [
        node
        for node, end in unrecorded.items()
        if end.was_stopped or folder.stop_was_requested(attempt, node)
    ]
    codes = {str(node): end.code for node, end in unrecorded.items()}
    with replacing(folder.attempt(attempt) / OUTCOME) as stream:
        outcome = {**result.as_json(), "exits": codes, "stopped": stopped}
        stream.write(json.dumps(outcome).encode())


def outcome_of(folder: RunFolder, attempt: int) -> Result | None:
    """Return how an attempt ended, if the supervisor recorded it."""
    found = read_json(folder.attempt(attempt) / OUTCOME) or {}
    state, reason = found.get("state"), found.get("reason")
    if not isinstance(state, str) or not isinstance(reason, str):
        return None
    return Result(state, one_line(reason, LONGEST_REASON), 0.0, cause_from(found.get("failure")))


def exits_and_stopped(folder: RunFolder, attempt: int) -> tuple[dict[int, int], list[int]]:
    """Return the exit codes of nodes that recorded none, and those of them that were stopped."""
    outcome = read_json(folder.attempt(attempt) / OUTCOME) or {}
    codes = unrecorded_exits(outcome)
    # An older version did not record which: most were, because another node failed.
    stopped, failure = outcome.get("stopped", list(codes)), cause_from(outcome.get("failure"))
    is_stopped = set(codes) & {node for node in _list(stopped) if type(node) is int}
    # Whatever happened to it later: the node that failed first was not stopped.
    return codes, sorted(is_stopped - {failure.node if failure else None})


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
