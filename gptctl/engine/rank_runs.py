"""How the processes of ranks exited, from the records of `rank_log.py`.

Pure: records in, data out.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gptctl.engine.contract import PEER_FAILED
from gptctl.engine.error_text import signal_name
from gptctl.engine.file_reading import json_lines


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
    log_start: int = 0  # the size of its log when it started
    oom: str | None = None  # see `error_text.describe_exit`

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


def failed_runs(runs: Iterable[RankRun]) -> list[RankRun]:
    """Return the ranks that failed, the earliest first; those that others stopped come last."""
    # Only the last process of each rank counts: torchrun restarted the earlier ones.
    latest = {run.rank: run for run in runs}
    newest_round = max((run.round for run in latest.values()), default=0)
    failed = [run for run in latest.values() if run.has_failed]
    # A failure in an earlier round did not end the job, unless it is the only one.
    failed = [run for run in failed if run.round == newest_round] or failed
    # Victims come last, even if they exited earlier by their node's clock: they are never the
    # cause. An unknown time sorts after all known ones.
    never = float("inf")
    return sorted(
        failed,
        key=lambda run: (run.is_victim, never if run.ended is None else run.ended, run.rank),
    )


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
    clocks: dict[str, float] = {}
    for name in records:
        if name.startswith("ranks."):
            events = json_lines(records[name])
            runs += _runs_of_node([_on_steady_clock(event, clocks) for event in events])
    runs.sort(key=lambda run: (run.rank, run.started or 0.0))
    return [run._replace(was_killed=not run.is_over and run.node in finished) for run in runs]


def _on_steady_clock(event: dict[str, Any], clocks: dict[str, float]) -> dict[str, Any]:
    """Correct the time of an event, in case the clock of its host was set meanwhile."""
    time, steady = _number(event.get("time")), _number(event.get("clock"))
    if time is None or steady is None:
        return event
    # The first record of a host says what its clock showed; from then on count its seconds.
    offset = clocks.setdefault(str(event.get("host")), time - steady)
    return {**event, "time": steady + offset}


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
            oom = event.get("oom")
            current[rank] = run._replace(
                ended=_number(event.get("time")),
                exit=_whole(event.get("exit")),
                signal=_whole(event.get("signal")),
                max_rss_mb=_number(event.get("max_rss_mb")),
                oom=oom if oom in ("cgroup", "machine") else None,
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
        log_start=_whole(event.get("log_start")) or 0,
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
