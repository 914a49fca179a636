"""How the ranks of an attempt ended: what they recorded, who failed first, and who only fell with it.

Pure: records in, frozen data out. Printing and reading is done in `report.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gptctl.engine.run_folder import json_lines

PEER_IS_GONE = 3  # the trainer's exit code when another rank has failed


class RankRun(NamedTuple):
    """One process of a rank, from its start to its end as far as they were recorded."""

    rank: int
    node: int | None = None
    host: str = "?"
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    exit: int | None = None
    signal: int | None = None
    max_rss_mb: float | None = None
    was_killed: bool = False  # left no end although its node's launch script has one
    round: int = 0  # counts the restarts by torchrun

    @property
    def is_over(self) -> bool:
        return self.exit is not None or self.signal is not None or self.was_killed

    @property
    def has_failed(self) -> bool:
        return self.is_over and self.exit != 0

    @property
    def is_victim(self) -> bool:
        """Ended as ranks end when another one has failed."""
        return self.signal == signal.SIGTERM or self.exit == PEER_IS_GONE

    @property
    def how(self) -> str:
        if self.signal is not None:
            return signal_name(self.signal)
        if self.exit is not None:
            return f"exit {self.exit}"
        return "killed, no end recorded" if self.was_killed else "running"


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, the others in the order of their ends, and what the launch scripts answered."""

    first: RankRun | None
    cascade: tuple[RankRun, ...]
    silent: tuple[RankRun, ...]  # started, and nothing since: running, or their machine is gone
    ranks_started: int
    node_exits: Mapping[int, int]

    @property
    def first_node(self) -> int | None:
        """The node to look at when no rank is to blame."""
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
    """Who failed first: by the time of the end; victims only if nobody failed otherwise."""
    latest = {run.rank: run for run in runs}
    newest_round = max((run.round for run in latest.values()), default=0)
    failed = [run for run in latest.values() if run.has_failed]
    failed = [run for run in failed if run.round == newest_round] or failed
    never = float("inf")
    failed.sort(
        key=lambda run: (run.is_victim, never if run.ended is None else run.ended, run.rank)
    )
    first, cascade = (failed[0], failed[1:]) if failed else (None, [])
    cascade.sort(key=lambda run: (never if run.ended is None else run.ended, run.rank))
    silent = tuple(run for run in latest.values() if not run.is_over)
    return Failure(first, tuple(cascade), silent, len(latest), dict(node_exits))


def node_exits(records: Mapping[str, bytes]) -> dict[int, int]:
    """The exit codes of the nodes' launch scripts."""
    codes = {}
    for name, data in records.items():
        text = data.strip()
        if name.endswith(".exit") and text.isdigit() and len(text) < 6:
            codes[int(name.split(".")[1])] = int(text)
    return codes


def rank_runs(records: Mapping[str, bytes]) -> list[RankRun]:
    """The processes of all ranks, those of one rank in their order."""
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
            begun = current.get(rank)
            if begun:
                done.append(begun)
            current[rank] = _described(rank, event, 0 if begun is None else begun.round + 1)
        elif event.get("event") == "end":
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
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """A finite one: JSON as Python reads it knows NaN and Infinity."""
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
