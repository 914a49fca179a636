"""How the ranks of an attempt exited: which failed first, and which failed as a consequence.

Pure: records in, frozen data out. `tables.py` makes the text.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gptctl.engine.contract import PEER_FAILED
from gptctl.engine.run_folder import json_lines


class RankRun(NamedTuple):
    """One process of a rank, with its start and its exit as far as they were recorded."""

    rank: int
    node: int | None = None
    host: str = "?"
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    exit: int | None = None
    signal: int | None = None
    max_rss_mb: float | None = None
    # Its exit is not recorded, but its node's launch script has exited: killed with its watcher.
    was_killed: bool = False
    round: int = 0  # counts the restarts by torchrun

    @property
    def is_over(self) -> bool:
        return self.exit is not None or self.signal is not None or self.was_killed

    @property
    def has_failed(self) -> bool:
        return self.is_over and self.exit != 0

    @property
    def is_victim(self) -> bool:
        """Whether it exited as ranks do when another rank has failed."""
        # torchrun stops the other ranks with SIGTERM; the trainer exits with its own code.
        return self.signal == signal.SIGTERM or self.exit == PEER_FAILED

    @property
    def how(self) -> str:
        if self.signal is not None:
            return signal_name(self.signal)
        if self.exit is not None:
            return f"exit {self.exit}"
        return "killed, no exit recorded" if self.was_killed else "running"


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, the others by time of exit, and the exit codes of nodes."""

    first: RankRun | None
    cascade: tuple[RankRun, ...]
    # Started, but no exit recorded: still running, or lost with their node.
    silent: tuple[RankRun, ...]
    ranks_started: int
    node_exits: Mapping[int, int]

    @property
    def first_node(self) -> int | None:
        """The first node that failed, if no rank did."""
        # A launch script can fail before it starts ranks: the setup, a missing interpreter.
        failing = sorted(node for node, code in self.node_exits.items() if code)
        return None if self.first or not failing else failing[0]

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


def find_failure(runs: Iterable[RankRun], node_exits: Mapping[int, int]) -> Failure:
    """Find the rank that failed first, by the time of its exit."""
    # Only the last process of each rank counts: torchrun restarted the earlier ones.
    latest = {run.rank: run for run in runs}
    newest_round = max((run.round for run in latest.values()), default=0)
    failed = [run for run in latest.values() if run.has_failed]
    # A failure in an earlier round did not end the job, unless it is the only one.
    failed = [run for run in failed if run.round == newest_round] or failed
    never = float("inf")
    # Victims come last, even if they exited earlier by their node's clock: they are never the
    # cause. An unknown time sorts after all known ones.
    failed.sort(
        key=lambda run: (run.is_victim, never if run.ended is None else run.ended, run.rank)
    )
    first, cascade = (failed[0], failed[1:]) if failed else (None, [])
    cascade.sort(key=lambda run: (never if run.ended is None else run.ended, run.rank))
    silent = tuple(run for run in latest.values() if not run.is_over)
    return Failure(first, tuple(cascade), silent, len(latest), dict(node_exits))


def node_exits(records: Mapping[str, bytes]) -> dict[int, int]:
    """Return the exit codes of the launch scripts, by node."""
    codes = {}
    for name, data in records.items():
        text = data.strip()
        # A full disk or a crash can leave the file empty or torn: ignore it.
        if name.endswith(".exit") and text.isdigit() and len(text) < 6:
            codes[int(name.split(".")[1])] = int(text)
    return codes


def rank_runs(records: Mapping[str, bytes]) -> list[RankRun]:
    """Return the processes of all ranks; those of one rank in the order of their starts."""
    finished = node_exits(records)
    runs: list[RankRun] = []
    for name in records:
        if name.startswith("ranks."):
            runs += _runs_of_node(json_lines(records[name]))
    runs.sort(key=lambda run: (run.rank, run.started or 0.0))
    return [run._replace(was_killed=not run.is_over and run.node in finished) for run in runs]


def _runs_of_node(events: Iterable[Mapping[str, Any]]) -> list[RankRun]:
    done: list[RankRun] = []
    current: dict[int, RankRun] = {}
    for event in events:
        rank = _whole(event.get("rank"))
        if rank is None:
            continue
        if event.get("event") == "start":
            # A second start of the same rank is a restart by torchrun.
            begun = current.get(rank)
            if begun:
                done.append(begun)
            current[rank] = _described(rank, event, 0 if begun is None else begun.round + 1)
        elif event.get("event") == "end":
            # The record of the start may be lost: keep the exit anyway.
            run = current.get(rank) or _described(rank, event, 0)._replace(started=None)
            current[rank] = run._replace(
                ended=_number(event.get("time")),
                exit=_whole(event.get("exit")),
                signal=_whole(event.get("signal")),
                max_rss_mb=_number(event.get("max_rss_mb")),
            )
    return done + list(current.values())


def _described(rank: int, event: Mapping[str, Any], number: int) -> RankRun:
    host = event.get("host")
    return RankRun(
        rank,
        node=_whole(event.get("node")),
        host=host if isinstance(host, str) else "?",
        pid=_whole(event.get("pid")),
        started=_number(event.get("time")),
        round=number,
    )


def _whole(value: Any) -> int | None:
    # bool is a subclass of int, but `true` is not a rank.
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """Return a finite number, else None."""
    # Python's JSON parser accepts NaN and Infinity, and times that no date can show.
    is_number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    )
    return float(value) if is_number else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run_json(run: RankRun, delay: float | None) -> dict[str, Any]:
    fields = run._asdict()
    return {
        **fields,
        "signal_name": None if run.signal is None else signal_name(run.signal),
        "delay": delay,
    }
