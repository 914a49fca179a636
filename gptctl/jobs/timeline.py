"""What happened to a job, in order and on steady clocks, for every verb that shows it.

The engine writes events.jsonl in the run folder, the trainer one beside its metrics. Ranks record
their own start and exit. Jobs of older versions have only that, and scripts no events of a trainer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.contract import ALIVE, LAST_STEP
from gptctl.engine.events import ATTEMPT, END, STARTED
from gptctl.engine.file_reading import (
    is_time,
    is_whole,
    read_json,
    read_text,
)
from gptctl.engine.rank_runs import RankRun, rank_runs
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.recorded_files import engine_events, recorded_rows, trainer_events
from gptctl.jobs.store import JobRecord
from gptctl.logs.local_files import LocalLogFiles
from gptctl.logs.metric_rows import HIGHEST_STEP, MOST_USELESS, Row, is_number

NEEDED = ("time", "clock", "step_time", "reader_time", "wait_time")  # of metrics.jsonl
MOST_ATTEMPTS = 10_000
MOST_EVENTS = 50_000  # of one file
RESET = 1.0  # seconds by which a steady clock may seem to go back; more: the machine was restarted
SUBMITTED, RANKS_UP, RANK_EXIT = "submitted", "ranks up", "rank exit"


class Event(NamedTuple):
    """Something that happened. `facts` has what its writer added."""

    name: str
    time: float  # seconds since the epoch, by a clock that nobody sets
    attempt: int
    facts: Mapping[str, Any]


class Allocation(NamedTuple):
    """A time in which nodes belonged to the job. A requeued job has several."""

    began: float
    ended: float | None  # None: it still has them
    gpus: int
    first_attempt: int


class LastStep(NamedTuple):
    """The last step that an attempt completed."""

    step: int
    time: float


class Timeline(NamedTuple):
    job: str
    submitted: float
    events: list[Event]  # sorted by time
    allocations: list[Allocation]
    rows: list[Row]  # of metrics.jsonl, every attempt's own, sorted by time
    last_steps: dict[int, LastStep]  # by attempt


class Clocks:
    """Times by the steady clocks of hosts: somebody may set the others while a job runs."""

    def __init__(self) -> None:
        self._offsets: dict[str, tuple[float, float]] = {}  # offset, and the clock seen last

    def time_of(self, fields: Mapping[str, Any], host: str | None = None) -> float | None:
        """The time of a record; those of one host must be asked for in their order."""
        time, clock = fields.get("time"), fields.get("clock")
        if not is_time(time):
            return None
        name = host or fields.get("host")
        if not is_time(clock) or not isinstance(name, str):
            return float(time)
        offset, last = self._offsets.get(name, (time - clock, clock))
        if clock < last - RESET:
            offset = time - clock
        self._offsets[name] = (offset, max(clock, last) if clock >= last - RESET else clock)
        return float(offset + clock)


def timeline_of(record: JobRecord, is_over: bool, known: list[Row] | None = None) -> Timeline:
    """Read what is known of a job, from its files on this machine.

    `known`: its rows, from a reader that has read the metrics already.
    """
    clocks, folder = Clocks(), RunFolder(record.local_dir)
    own = events_in(engine_events(record), clocks)
    trainer = events_in(trainer_events(record), clocks)
    # Those that are there: a damaged folder may have any number in its name.
    attempts = folder.attempt_numbers()[-MOST_ATTEMPTS:]
    runs = {number: _runs(record, number) for number in attempts}
    ranks = [event for number, each in runs.items() for event in _rank_events(number, each)]
    events = sorted([*own, *trainer, *ranks], key=lambda event: event.time)
    submitted = Event(SUBMITTED, record.created, -1, {})
    hosts = {event.attempt: event.facts.get("host") for event in trainer}
    rows = _on_clocks(_metrics(record) if known is None else known, clocks, hosts)
    allocations = _allocations(record, folder, events, rows, is_over)
    steps = {number: step for number in runs if (step := _last_step(folder, number))}
    return Timeline(record.id, record.created, [submitted, *events], allocations, rows, steps)


def events_in(lines: Iterable[Mapping[str, Any]], clocks: Clocks) -> list[Event]:
    # The newest ones: a damaged file can have a million short ones.
    events: deque[Event] = deque(maxlen=MOST_EVENTS)
    useless = 0
    for fields in lines:
        if "event" not in fields and (useless := useless + 1) > MOST_USELESS:
            break
        name, attempt, moment = fields.get("event"), fields.get("attempt"), clocks.time_of(fields)
        attempt = attempt if is_whole(attempt, -1, MOST_ATTEMPTS) else 0
        if isinstance(name, str) and moment is not None:
            events.append(Event(name[:100], moment, attempt, fields))
    return list(events)


def _runs(record: JobRecord, attempt: int) -> list[RankRun]:
    return rank_runs(LocalLogFiles(Path(record.log_dir), record.run_folder).records(attempt))


def _rank_events(attempt: int, runs: Iterable[RankRun]) -> Iterator[Event]:
    """When the last rank had started, and when each one that failed exited."""
    runs = list(runs)
    starts = [run.started for run in runs if is_time(run.started) and run.round == 0]
    if starts:
        yield Event(RANKS_UP, max(starts), attempt, {"ranks": len(starts)})
    for run in runs:
        if is_time(run.ended):
            facts = {"rank": run.rank, "node": run.node, "how": run.how}
            yield Event(RANK_EXIT, run.ended, attempt, facts)


def _metrics(record: JobRecord) -> list[Row]:
    """Every recorded step, also those that were trained again later."""
    return recorded_rows(record, NEEDED, with_repeated=True)


def _on_clocks(rows: Iterable[Row], clocks: Clocks, hosts: Mapping[int, Any]) -> list[Row]:
    rows = sorted((row for row in rows if is_time(row.get("time"))), key=lambda row: row["time"])
    steady: list[Row] = []  # new rows: whoever reads on must find the old ones as they were
    for row in rows:
        host = hosts.get(row["attempt"])
        if isinstance(host, str) and is_number(row.get("clock")):
            row = {**row, "time": clocks.time_of(row, host)}
        steady.append(row)
    return sorted(steady, key=lambda row: row["time"])


def _last_step(folder: RunFolder, attempt: int) -> LastStep | None:
    """Read what the trainer writes in every step."""
    words = read_text(folder.attempt(attempt) / LAST_STEP, 100).split()
    if len(words) < 2 or not words[0].isdecimal() or len(words[0]) > 15:
        return None
    try:
        step, moment = int(words[0]), float(words[1])
    except ValueError:
        return None
    return LastStep(step, moment) if step < HIGHEST_STEP and is_time(moment) else None


def _allocations(
    record: JobRecord,
    folder: RunFolder,
    events: list[Event],
    rows: list[Row],
    is_over: bool,
) -> list[Allocation]:
    """When the job had its nodes. An engine that was killed is known to have lived until then."""
    starts = [event for event in events if event.name == STARTED]
    if not starts:  # a job of an older version
        starts = [event for event in events if event.name == RANKS_UP][:1]
    last_sign = _moment(read_json(folder.path / ALIVE))
    # Both are sorted: a damaged file can have thousands of starts.
    moments, steps = [event.time for event in events], [row["time"] for row in rows]
    found = []
    for number, start in enumerate(starts):
        following = starts[number + 1] if number + 1 < len(starts) else None
        until = following.time if following else float("inf")
        inside = events[bisect_left(moments, start.time) : bisect_left(moments, until)]
        end = next((e.time for e in inside if e.name == END), None)
        if end is None and (following or is_over):
            seen = _moment(following.facts.get("seen")) if following else last_sign
            trained = steps[bisect_left(steps, start.time) : bisect_left(steps, until)]
            signs = [e.time for e in inside] + trained + ([seen] if seen else [])
            # None is before that if two starts have the same time.
            end = min(until, max((sign for sign in signs if sign < until), default=start.time))
        gpus = _gpus(start.facts, record)
        found.append(Allocation(start.time, end, gpus, max(0, start.attempt)))
    return found


def _moment(sign: object) -> float | None:
    moment = sign.get("time") if isinstance(sign, dict) else None
    return moment if is_time(moment) else None


def _gpus(facts: Mapping[str, Any], record: JobRecord) -> int:
    nodes, per_node = facts.get("nodes"), facts.get("per_node")
    is_known = is_whole(nodes, 1, 1 << 16) and is_whole(per_node, 1, 1 << 10)
    return nodes * per_node if is_known else record.nodes * record.per_node  # type: ignore[operator]


def attempt_starts(timeline: Timeline) -> dict[int, float]:
    """When each attempt began; those of older versions when their ranks did."""
    starts: dict[int, float] = {}
    for name in (ATTEMPT, RANKS_UP):
        for event in timeline.events:
            if event.name == name:
                starts.setdefault(event.attempt, event.time)
    return dict(sorted(starts.items()))
