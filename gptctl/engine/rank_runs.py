"""How the processes of ranks exited, from the records of `rank_log.py`.

Pure: records in, data out.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gptctl.engine.contract import OUTCOME, PEER_FAILED
from gptctl.engine.error_text import signal_name
from gptctl.engine.file_reading import parse_json
from gptctl.engine.rank_owners import node_in_name, rank_events

Event = dict[str, Any]
NO_TIMES: Mapping[str, float] = MappingProxyType({})
SAME_CLOCK = 1.0  # seconds by which clocks of hosts may differ; synchronized ones do by less


class RankRun(NamedTuple):
    """One process of a rank, with its start and its exit as far as they were recorded."""

    rank: int
    node: int | None = None
    host: str = "?"
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    clock: float | None = None  # when it ended, by the steady clock of its host
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


def unrecorded_exits(outcome: Mapping[str, Any]) -> dict[int, int]:
    """Return the exit codes of nodes that recorded none, from the outcome of an attempt."""
    exits = outcome.get("exits")
    pairs = exits.items() if isinstance(exits, dict) else ()
    # A host of an ssh job may have sent this file.
    return {
        int(node): code
        for node, code in pairs
        if node.isdecimal() and len(node) < 8 and type(code) is int
    }


def rank_runs(
    records: Mapping[str, bytes], changed: Mapping[str, float] = NO_TIMES
) -> list[RankRun]:
    """Return the processes of all ranks; those of one rank in the order of their starts.

    `changed`: when each file was written last, by the clock of the file system that all hosts
    share. With it, times of hosts whose clocks differ can be compared.
    """
    finished = node_exits(records)
    clocks: dict[str, float] = {}
    names = {node: name for name in records if (node := node_in_name(name)) is not None}
    nodes = {
        node: [_on_steady_clock(event, clocks) for event in rank_events(records[name])]
        for node, name in sorted(names.items())
    }
    # The nodes of one host have the same clock, which is better than any other.
    shared = changed if len(clocks) > 1 else NO_TIMES
    runs: list[RankRun] = []
    for node, events in nodes.items():
        found = _runs_of_node(node, _on_shared_clock(events, shared.get(names[node])))
        runs += [run._replace(was_killed=not run.is_over and node in finished) for run in found]
    outcome = parse_json(records.get(OUTCOME, b"")) or {}
    runs = _without_other_claims(runs, {*finished, *unrecorded_exits(outcome)})
    return sorted(runs, key=lambda run: (run.rank, run.started or 0.0))


def _without_other_claims(runs: Iterable[RankRun], finished: Collection[int]) -> list[RankRun]:
    """Let a rank move to another node only if its process on the first one has failed.

    That happens in elastic jobs: the nodes that are left are numbered again.
    """
    latest: dict[int, RankRun] = {}
    kept = []
    for run in runs:
        known = latest.get(run.rank, run)
        is_left = known.has_failed or (not known.is_over and known.node in finished)
        if run.node == known.node or is_left:
            latest[run.rank] = run
            kept.append(run)
    return kept


def _on_steady_clock(event: Event, clocks: dict[str, float]) -> Event:
    """Correct the time of an event, in case the clock of its host was set meanwhile."""
    time, steady = _number(event.get("time")), _number(event.get("clock"))
    if time is None or steady is None:
        return event
    # The first record of a host says what its clock showed; from then on count its seconds.
    offset = clocks.setdefault(str(event.get("host")), time - steady)
    return {**event, "time": steady + offset}


def _on_shared_clock(events: list[Event], changed: float | None) -> list[Event]:
    """Correct the times of a node whose clock differs from that of the file system."""
    times = [_number(event.get("time")) for event in events]
    last = times[-1] if times else None
    # The last event is the last write to the file. Below a second, it tells the order of
    # writes on several hosts no better than their clocks do.
    if last is None or changed is None or abs(changed - last) < SAME_CLOCK:
        return events
    shift = changed - last
    return [
        event if time is None else {**event, "time": time + shift}
        for event, time in zip(events, times)
    ]


def _runs_of_node(node: int, events: Iterable[Mapping[str, Any]]) -> list[RankRun]:
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
            current[rank] = _described(rank, node, event, 0 if begun is None else begun.round + 1)
        elif event.get("event") == "end":
            # The record of the start may be lost: keep the exit anyway.
            run = current.get(rank) or _described(rank, node, event)._replace(started=None)
            oom = event.get("oom")
            current[rank] = run._replace(
                ended=_number(event.get("time")),
                clock=_number(event.get("clock")),
                exit=_whole(event.get("exit")),
                signal=_whole(event.get("signal")),
                max_rss_mb=_number(event.get("max_rss_mb")),
                oom=oom if oom in ("cgroup", "machine") else None,
            )
    return done + list(current.values())


def _described(rank: int, node: int, event: Mapping[str, Any], number: int = 0) -> RankRun:
    host = event.get("host")
    return RankRun(
        rank,
        node=node,  # of the file: a host may write anything into its own
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
    # A time that is larger cannot be shown as a date.
    is_number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    )
    return float(value) if is_number else None
