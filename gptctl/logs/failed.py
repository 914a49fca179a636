"""How the ranks of an attempt exited: which failed first, and which failed as a consequence.

Pure: records in, frozen data out. `tables.py` makes the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gptctl.engine.cause import Cause, recorded_cause
from gptctl.engine.error_text import signal_name
from gptctl.engine.rank_runs import RankRun, failed_runs, node_exits, rank_runs


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, the others by time of exit, and the exit codes of nodes."""

    first: RankRun | None
    cascade: tuple[RankRun, ...]
    # Started, but no exit recorded: still running, or killed with their watcher (`was_killed`).
    silent: tuple[RankRun, ...]
    ranks_started: int
    node_exits: Mapping[int, int]
    cause: Cause | None = None  # what the engine found, where the logs are, if it did

    @property
    def first_node(self) -> int | None:
        """The first node that failed, if no rank did."""
        if self.first:
            return None
        if self.cause:
            return self.cause.node
        # A launch script can fail before it starts ranks: the setup, a missing interpreter.
        return next((node for node, code in sorted(self.node_exits.items()) if code), None)

    @property
    def first_file(self) -> tuple[str, int | None]:
        """The kind and number of the log that explains it: that of a rank or of a node."""
        return ("rank", self.first.rank) if self.first else ("node", self.first_node)

    @property
    def is_failure(self) -> bool:
        return self.first is not None or self.first_node is not None

    def delay(self, run: RankRun) -> float | None:
        """Seconds after the first failure."""
        begin = self.first.ended if self.first else None
        return None if begin is None or run.ended is None else run.ended - begin

    def as_json(self) -> dict[str, Any]:
        return {
            "failed": self.is_failure,
            "first": _run_json(self.first, 0.0) if self.first else None,
            "cascade": [_run_json(run, self.delay(run)) for run in self.cascade],
            "silent": [_run_json(run, None) for run in self.silent],
            "ranks_started": self.ranks_started,
            "node_exits": {str(node): code for node, code in sorted(self.node_exits.items())},
        }


def find_failure(
    runs: Iterable[RankRun],
    exits: Mapping[int, int],
    cause: Cause | None = None,
    is_over: bool = False,
) -> Failure:
    """Find the rank that failed first: the one that the job recorded, else by the time of exit.

    `is_over`: the job has ended, and all records are here.
    """
    latest = {run.rank: run for run in runs}
    failed = failed_runs(latest.values())
    # With its node: the host that sent the cause may name the rank of another one. The sort is
    # stable: the others stay in order.
    recorded = (cause.rank, cause.node) if cause else None
    # A rank that exited with 0 too early: no failure by itself, but that of the others.
    early = latest.get(cause.rank) if cause and cause.rank is not None else None
    if failed and early and early.exit == 0 and (early.rank, early.node) == recorded:
        failed.append(early)
    failed.sort(key=lambda run: (run.rank, run.node) != recorded)
    first, cascade = (failed[0], failed[1:]) if failed else (None, [])
    # Its ranks failed because the node did: torchrun was killed, or its host lost.
    if cause and cause.rank is None:
        first, cascade = None, failed
    never = float("inf")
    cascade.sort(key=lambda run: (never if run.ended is None else run.ended, run.rank))
    # No rank outlives its job. Not failures: nothing tells that they failed before others did.
    silent = tuple(run._replace(was_killed=is_over) for run in latest.values() if not run.is_over)
    return Failure(first, tuple(cascade), silent, len(latest), dict(exits), cause)


def failure_in(
    records: Mapping[str, bytes], is_over: bool = False, known: Cause | None = None
) -> Failure:
    """Find the failure of an attempt in its records.

    `known`: its first failure, if the engine was killed before it could record it.
    """
    cause = recorded_cause(records) or known
    return find_failure(rank_runs(records), node_exits(records), cause, is_over)


def _run_json(run: RankRun, delay: float | None) -> dict[str, Any]:
    fields = run._asdict()
    return {
        **fields,
        "signal_name": None if run.signal is None else signal_name(run.signal),
        "delay": delay,
    }
