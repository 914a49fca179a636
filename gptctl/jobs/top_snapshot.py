"""What `gptctl top` shows at one moment: frozen data, from readings of jobs. Pure.

All text in it is safe for a terminal, and has one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from gptctl.engine.error_text import one_line
from gptctl.engine.events import ATTEMPT, END, FAILURE, REQUEUE, SIGNAL, STARTED
from gptctl.engine.job_result import LONGEST_REASON, RUNNING
from gptctl.jobs.job_reading import JobReading, RankLog
from gptctl.jobs.rank_times import RankTimes
from gptctl.jobs.timeline import RANK_EXIT, RANKS_UP, SUBMITTED, Event
from gptctl.jobs.training_progress import from_rows
from gptctl.logs.metric_rows import Row, is_number
from gptctl.logs.progress import RECENT
from gptctl.text import count
from trainer.event_names import CHECKPOINT, COMMITTED, EVALUATION, FAILED, FIRST_STEP, STOP

CURVE_VALUES = 24  # values of the small curve in a row
MOST_EVENTS = 60
NAMED = 3  # ranks that are named as slow
SLOW = 1.10  # times the median, from which on a rank is slow
LONGEST_NAME = 64
EXIT_OK = "exit 0"  # of a rank that is done


class JobSummary(NamedTuple):
    """A job in one row. What is not known is None."""

    job: str
    state: str
    reason: str
    cluster: str
    nodes: int
    world: int
    created: float
    duration: float | None  # seconds since it got its nodes
    step: int | None
    total: int | None
    percent: int | None
    left: float | None  # seconds
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    goodput: float | None
    losses: tuple[float, ...]  # the curve of the loss, in few values
    failed_rank: int | None = None  # that failed first


class SlowRank(NamedTuple):
    rank: int
    node: int
    host: str  # empty if it is not known
    ms: float
    ratio: float  # times the median


class MetricCurve(NamedTuple):
    steps: tuple[int, ...]
    values: tuple[float, ...]


class ShownEvent(NamedTuple):
    time: float
    text: str
    is_bad: bool


class JobDetail(NamedTuple):
    """One job in full."""

    summary: JobSummary
    time: float  # the moment that it is shown at
    loss: MetricCurve
    tokens_per_second: MetricCurve
    ranks: RankTimes | None
    median_ms: float | None
    slowest: tuple[SlowRank, ...]
    events: tuple[ShownEvent, ...]  # newest last
    log: RankLog | None
    memory: float | None  # peak bytes of rank 0
    gpu_memory: float | None


class TopSnapshot(NamedTuple):
    time: float
    is_past: bool
    jobs: tuple[JobSummary, ...]
    detail: JobDetail | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return dict(_plain(self))


def _plain(value: Any) -> Any:
    """Named tuples as objects, also those inside of others."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value


def summary_of(reading: JobReading, now: float) -> JobSummary:
    record, state = reading.record, reading.state
    recent = reading.run[-2 * RECENT :]
    progress = from_rows(recent, reading.changed) if recent else None
    if progress and progress.total is None:
        progress = progress._replace(total=reading.total)
    is_running = state.state == RUNNING
    facts: Mapping[str, Any] = progress.as_json(now, is_running) if progress else {}
    facts = facts or reading.kept.get("progress") or {}
    began = reading.timeline.allocations[0].began if reading.timeline.allocations else None
    until = now if is_running else reading.ended
    return JobSummary(
        job=one_line(record.id, LONGEST_NAME),
        state=state.state,
        reason=one_line(state.reason, LONGEST_REASON),
        cluster=one_line(record.cluster, LONGEST_NAME),
        nodes=record.nodes,
        world=record.world,
        created=record.created,
        duration=_duration(began, until, reading.kept),
        step=facts.get("step"),
        total=facts.get("total") if facts else reading.total,
        percent=facts.get("percent"),
        left=facts.get("seconds_left"),
        loss=facts.get("loss"),
        valid_loss=facts.get("valid_loss"),
        tokens_per_second=facts.get("tokens_per_second"),
        goodput=reading.goodput,
        losses=averaged([loss for row in reading.run if (loss := row.get("loss")) is not None]),
        failed_rank=state.failure.rank if state.failure else None,
    )


def _duration(began: float | None, until: float | None, kept: Mapping[str, Any]) -> float | None:
    if began is None or until is None:
        return kept.get("duration")
    return max(0.0, until - began)


def averaged(values: Sequence[float], most: int = CURVE_VALUES) -> tuple[float, ...]:
    """Reduce values to few: the means of equal parts."""
    if len(values) <= most:
        return tuple(values)
    bounds = [len(values) * number // most for number in range(most + 1)]
    return tuple(fmean(values[begin:end]) for begin, end in pairwise(bounds))


def detail_of(reading: JobReading, now: float) -> JobDetail:
    ranks = reading.ranks
    latest = reading.run[-1] if reading.run else {}
    memory, gpu_memory = (latest.get(name) for name in ("memory", "gpu_memory"))
    return JobDetail(
        summary=summary_of(reading, now),
        time=now,
        loss=curve_of(reading.run, "loss"),
        tokens_per_second=curve_of(reading.run, "ips_total"),
        ranks=ranks,
        median_ms=ranks.median if ranks else None,
        slowest=slow_ranks(ranks, reading.record.per_node, reading.hosts) if ranks else (),
        events=tuple(map(shown_event, without_most_exits(reading.timeline.events)))[-MOST_EVENTS:],
        log=reading.log,
        memory=memory if is_number(memory) else None,
        gpu_memory=gpu_memory if is_number(gpu_memory) else None,
    )


def curve_of(rows: Sequence[Row], name: str) -> MetricCurve:
    # The readers of rows keep only finite numbers.
    steps = tuple([row["step"] for row in rows if row.get(name) is not None])
    return MetricCurve(steps, tuple([row[name] for row in rows if row.get(name) is not None]))


def slow_ranks(ranks: RankTimes, per_node: int, hosts: Sequence[str]) -> tuple[SlowRank, ...]:
    """The slowest ranks, if they are much slower than most."""
    middle = ranks.median
    if middle <= 0:
        return ()
    slowest = sorted(range(len(ranks.own_ms)), key=lambda rank: -ranks.own_ms[rank])[:NAMED]
    found = []
    for rank in slowest:
        node, ms = rank // max(1, per_node), ranks.own_ms[rank]
        if ms >= SLOW * middle:
            host = hosts[node] if node < len(hosts) else ""
            found.append(SlowRank(rank, node, host, ms, ms / middle))
    return tuple(found)


def without_most_exits(events: Sequence[Event]) -> list[Event]:
    """Without most exits of ranks: when one fails, a thousand others follow within a second."""
    told, exits = list[Event](), Counter[int]()
    for event in events:
        if event.name == RANK_EXIT:
            if event.facts.get("how") == EXIT_OK:
                continue
            exits[event.attempt] += 1
        if event.name != RANK_EXIT or exits[event.attempt] <= NAMED:
            told.append(event)
    return told


_BAD = (FAILURE, RANK_EXIT, REQUEUE, SIGNAL, STOP, FAILED)


def shown_event(event: Event) -> ShownEvent:
    return ShownEvent(event.time, event_text(event), event.name in _BAD)


def event_text(event: Event) -> str:
    """What happened, in a few words; of events that a newer version writes, their names."""
    facts = event.facts
    texts = {
        SUBMITTED: "submitted",
        STARTED: f"started on {_number(facts, 'nodes', 'node')}",
        ATTEMPT: f"attempt {event.attempt} begins",
        RANKS_UP: f"{_number(facts, 'ranks', 'rank')} up",
        FIRST_STEP: "first step" + _after(" after step {}", facts.get("resumed")),
        CHECKPOINT: "checkpoint" + _after(" of step {}", facts.get("step")),
        COMMITTED: "checkpoint committed" + _after(", step {}", facts.get("step")),
        EVALUATION: "evaluation" + _after(" at step {}", facts.get("step")),
        RANK_EXIT: f"rank {facts.get('rank')} exited: {facts.get('how')}",
        FAILURE: f"attempt {event.attempt} failed: {facts.get('reason')}",
        END: "end" + _after(": {}", facts.get("state")),
    }
    return one_line(texts.get(event.name, event.name), 200)


def _number(facts: Mapping[str, Any], name: str, noun: str) -> str:
    number = facts.get(name)
    return count(number, noun) if isinstance(number, int) else f"{noun}s"


def _after(form: str, value: object) -> str:
    return form.format(f"{value:,}" if isinstance(value, int) else value) if value else ""
