"""Where the time of a job's GPUs went: every second of an allocation is in exactly one account.

Pure: a timeline in, seconds out. All GPUs of a job wait for one another in every step, so an
account holds seconds of the job; times its GPUs they are GPU seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gptctl.engine.error_text import one_line
from gptctl.engine.events import FAILURE
from gptctl.engine.file_reading import is_whole
from gptctl.jobs.timeline import RANK_EXIT, RANKS_UP, Event, LastStep, Timeline, attempt_starts
from gptctl.logs.metric_rows import HIGHEST_STEP, Row, is_number
from trainer.event_names import (
    CHECKPOINT,
    COMMITTED,
    EVALUATION,
    FAILED,
    FINISHED,
    FIRST_STEP,
    GROUP,
    STOP,
)

STARTING, DATA, COMPUTE, WAIT = "starting", "data", "compute", "wait"
CHECKPOINTS, EVALUATIONS, REPEATED = "checkpoint", "evaluation", "repeated"
HANG, IDLE, UNKNOWN = "hang", "idle", "unknown"
# In the order in which they are shown. `unknown`: programs that are not the bundled trainer.
ACCOUNTS = (
    COMPUTE, REPEATED, DATA, WAIT, CHECKPOINTS, EVALUATIONS, STARTING, HANG, IDLE, UNKNOWN,
)  # fmt: skip
LONGEST_CAUSE = 300  # characters
LEAST_HANG = 10.0  # seconds without progress before a failure that count as a hang
HANG_STEPS = 3.0  # and so many times as long as a step


_Item = TypeVar("_Item", Event, Row)


class Segment(NamedTuple):
    """A part of an attempt, and the accounts that it is in."""

    began: float
    ended: float
    seconds: Mapping[str, float]  # by account; they add up to its length


class AttemptCosts(NamedTuple):
    attempt: int
    began: float
    ended: float
    gpus: int
    cause: str  # why it ended, if it failed or was stopped
    repeated_steps: int
    segments: list[Segment]

    @property
    def allocation(self) -> float:
        """GPU seconds."""
        return self.gpus * (self.ended - self.began)

    @property
    def gpu_seconds(self) -> dict[str, float]:
        return {name: self.gpus * part for name, part in self.seconds.items()}

    @property
    def goodput(self) -> float | None:
        return goodput_of(self.gpu_seconds, self.allocation)

    @property
    def seconds(self) -> dict[str, float]:
        total = dict.fromkeys(ACCOUNTS, 0.0)
        for segment in self.segments:
            for name, seconds in segment.seconds.items():
                total[name] += seconds
        return total


class Ledger(NamedTuple):
    job: str
    queued: float  # seconds without nodes: nobody pays for them
    attempts: list[AttemptCosts]

    @property
    def gpu_seconds(self) -> dict[str, float]:
        total = dict.fromkeys(ACCOUNTS, 0.0)
        for each in self.attempts:
            for name, seconds in each.gpu_seconds.items():
                total[name] += seconds
        return total

    @property
    def allocation(self) -> float:
        """GPU seconds that the job had its nodes."""
        return sum(each.allocation for each in self.attempts)

    @property
    def goodput(self) -> float | None:
        """The share of the allocation that computed something new."""
        return goodput_of(self.gpu_seconds, self.allocation)


def goodput_of(accounts: Mapping[str, float], allocation: float) -> float | None:
    """The share that computed something new; None where gptctl cannot see the steps."""
    return accounts[COMPUTE] / allocation if allocation > 0 and not accounts[UNKNOWN] else None


def ledger_of(timeline: Timeline, now: float, reached: int = 0) -> Ledger:
    """Account for a job; `reached`: the last step of the job that it continues, if it does."""
    attempts: list[AttemptCosts] = []
    # Once for all: a damaged file can have thousands of attempts.
    rows, events = _by_attempt(timeline.rows), _by_attempt(timeline.events)
    for span in _attempts(timeline, now):
        if not span.has_begun:
            attempts.append(_attempt(timeline, span, [], [], reached))
            continue
        own = rows.get(span.attempt, [])
        costs = _attempt(timeline, span, events.get(span.attempt, []), own, reached)
        attempts.append(costs)
        last = timeline.last_steps.get(span.attempt)
        reached = max([reached, *(row["step"] for row in own), *([last.step] if last else [])])
    return Ledger(timeline.job, _queued(timeline, now), attempts)


def _by_attempt(items: Iterable[_Item]) -> dict[int, list[_Item]]:
    found: dict[int, list[_Item]] = {}
    for item in items:
        attempt = item.attempt if isinstance(item, Event) else item["attempt"]
        found.setdefault(attempt, []).append(item)
    return found


class _Span(NamedTuple):
    attempt: int
    began: float
    ended: float
    gpus: int
    is_last: bool  # of its allocation
    is_running: bool
    has_begun: bool = True  # False: the engine ended before it, and another one began it


def _queued(timeline: Timeline, now: float) -> float:
    """From the submission to the first nodes, and between a requeue and the next ones."""
    waiting, since = 0.0, timeline.submitted
    for each in timeline.allocations:
        waiting += max(0.0, each.began - since)
        since = now if each.ended is None else each.ended
    if not timeline.allocations:
        waiting = max(0.0, now - since)
    return waiting


def _attempts(timeline: Timeline, now: float) -> list[_Span]:
    """The attempts, one after the other: together they fill the allocations."""
    starts, spans = attempt_starts(timeline), list[_Span]()
    for index, allocation in enumerate(timeline.allocations):
        ended = max(allocation.began, now if allocation.ended is None else allocation.ended)
        following = timeline.allocations[index + 1 : index + 2]
        until = following[0].began if following else float("inf")
        inside = [n for n in starts if allocation.began <= starts[n] < until]
        inside.sort(key=lambda n: starts[n])
        first = allocation.first_attempt
        # An engine that was killed before its attempt: the next one has begun it.
        has_begun, inside = bool(inside) or first not in starts, inside or [first]
        # The first one includes what the engine did before it.
        bounds = [allocation.began, *(min(starts.get(n, ended), ended) for n in inside[1:]), ended]
        for number, begin, end in zip(inside, bounds, bounds[1:]):
            is_last = number == inside[-1]
            is_running = is_last and allocation.ended is None
            gpus = allocation.gpus
            spans.append(_Span(number, begin, end, gpus, is_last, is_running, has_begun))
    return spans


def _attempt(
    timeline: Timeline,
    span: _Span,
    events: Sequence[Event],
    rows: Sequence[Row],
    reached: int,
) -> AttemptCosts:
    rows = [row for row in rows if is_number(row.get("step_time"))]
    segments, repeated = _Accounting(span, events, rows, timeline.last_steps, reached).segments()
    return AttemptCosts(
        span.attempt, span.began, span.ended, span.gpus, _cause(events), repeated, segments
    )


def _cause(events: Iterable[Event]) -> str:
    for event in events:
        if event.name == FAILURE:
            return one_line(str(event.facts.get("reason", "")), LONGEST_CAUSE)
    return ""


class _Accounting:
    """The segments of one attempt, from its start to its end without gaps."""

    def __init__(
        self,
        span: _Span,
        events: Sequence[Event],
        rows: Sequence[Row],
        last_steps: Mapping[int, LastStep],
        reached: int,
    ) -> None:
        self.span, self.events, self.rows, self.reached = span, events, rows, reached
        self.last = last_steps.get(span.attempt)
        # Sorted by time: a long job has thousands, and each of its steps asks for a few.
        self.stalls = sorted((e for e in events if e.name in _STALLS), key=lambda e: e.time)
        self.stall_times = [event.time for event in self.stalls]
        self.found: list[Segment] = []
        self.at = span.began
        self.repeated = 0

    def segments(self) -> tuple[list[Segment], int]:
        first = self._first(FIRST_STEP)
        if first is None:
            self._without_steps()
        else:
            self._until(first.time, STARTING)
            self._train(first)
            self._finish()
        return self.found, self.repeated

    def _first(self, *names: str) -> Event | None:
        return next((event for event in self.events if event.name in names), None)

    def _until(self, moment: float, account: str) -> None:
        """Put everything up to this moment into one account."""
        moment = min(max(moment, self.at), self.span.ended)
        if moment > self.at:
            self.found.append(Segment(self.at, moment, {account: moment - self.at}))
            self.at = moment

    def _without_steps(self) -> None:
        """The trainer never came so far, or it is another program."""
        exits = [event.time for event in self.events if event.name == RANK_EXIT]
        ups = [event.time for event in self.events if event.name == RANKS_UP]
        if ups and not self._first(GROUP, FAILED):
            self._until(ups[0], STARTING)
            self._until(max(exits, default=self.span.ended), UNKNOWN)
        else:
            self._until(min(exits, default=self.span.ended), STARTING)
        self._until(self.span.ended, IDLE)

    def _train(self, first: Event) -> None:
        before, row = _resumed(first), None
        for moment, item in self._rows_and_starts(first):
            if isinstance(item, Event):
                # torchrun itself has restarted the ranks.
                self.reached = max(self.reached, before)
                self._until(moment, STARTING)
                before = _resumed(item)
            else:
                self._steps(before, item["step"], moment, item)
                before, row = item["step"], item
        # Steps after the last one that was logged took as long as those before it.
        if self.last and self.last.step > before:
            self._steps(before, self.last.step, self.last.time, row)

    def _rows_and_starts(self, first: Event) -> list[tuple[float, Row | Event]]:
        again = [e for e in self.events if e.name == FIRST_STEP and e is not first]
        found: list[tuple[float, Row | Event]] = [(event.time, event) for event in again]
        found += [(row["time"], row) for row in self.rows]
        return sorted(found, key=lambda item: item[0])

    def _steps(self, before: int, step: int, moment: float, row: Row | None) -> None:
        """Account for the steps after `before` up to `step`, which ended at this moment."""
        began, ended = self.at, min(max(moment, self.at), self.span.ended)
        length, steps = ended - began, max(0, step - before)
        seconds = self._stalls(began, ended)
        trained = max(0.0, length - sum(seconds.values()))
        again = max(0, min(step, self.reached) - before)
        self.repeated += again
        share = again / steps if steps else 0.0
        for name, part in _parts(row, trained, steps).items():
            seconds[name] = seconds.get(name, 0.0) + part * (1 - share if name != IDLE else 1)
            if name != IDLE:
                seconds[REPEATED] = seconds.get(REPEATED, 0.0) + part * share
        if length > 0:
            self.found.append(Segment(began, ended, seconds))
            self.at = ended

    def _stalls(self, began: float, ended: float) -> dict[str, float]:
        """What the training waited for in this time, besides its steps."""
        seconds: dict[str, float] = {}
        first, after = (bisect_right(self.stall_times, moment) for moment in (began, ended))
        for event in self.stalls[first:after]:
            account = _STALLS[event.name]
            value = event.facts.get("stall", event.facts.get("seconds"))
            if is_number(value) and value > 0:
                seconds[account] = seconds.get(account, 0.0) + min(value, ended - began)
        return _fitted(seconds, ended - began)

    def _finish(self) -> None:
        """From the last step to the end: the last save, the test run, or a failure."""
        failed = self._first(FAILED, RANK_EXIT, FAILURE)
        if failed and self._hangs(failed.time - self.at):
            self._until(failed.time, HANG)
        for event in self.events:
            if event.time <= self.at:
                continue
            # Training waits only for the last checkpoint; others are written beside it.
            if event.name == COMMITTED and self.last and event.facts.get("step") == self.last.step:
                self._until(event.time, CHECKPOINTS)
            elif event.name == EVALUATION:
                seconds = event.facts.get("seconds")
                self._until(event.time - (seconds if is_number(seconds) else 0.0), IDLE)
                self._until(event.time, EVALUATIONS)
        is_training = self.span.is_running and not self._first(FINISHED, STOP, FAILED, FAILURE)
        # The steps since the last log line are not known yet.
        self._until(self.span.ended, COMPUTE if is_training else IDLE)

    def _hangs(self, seconds: float) -> bool:
        times = [row["step_time"] for row in self.rows if is_number(row.get("step_time"))]
        if self._first(FINISHED, STOP):
            return False
        return seconds > max(LEAST_HANG, HANG_STEPS * (times[-1] if times else 0.0))


def _resumed(first: Event) -> int:
    step = first.facts.get("resumed")
    return step if is_whole(step, 0, HIGHEST_STEP) else 0


_STALLS = {CHECKPOINT: CHECKPOINTS, EVALUATION: EVALUATIONS}


def _parts(row: Row | None, trained: float, steps: int) -> dict[str, float]:
    """Divide the time of some steps by what the row measured; what it does not explain is idle."""
    if row is None or not steps:
        return {COMPUTE if steps else IDLE: trained}
    names = ("step_time", "reader_time", "wait_time")
    # A damaged record can have less than nothing.
    cost, reader, wait = (max(0.0, row.get(name) or 0.0) for name in names)
    parts = {DATA: reader * steps, WAIT: wait * steps}
    parts[COMPUTE] = max(0.0, cost * steps - sum(parts.values()))
    parts = _fitted(parts, trained)
    return {**parts, IDLE: max(0.0, trained - sum(parts.values()))}


def _fitted(seconds: dict[str, float], length: float) -> dict[str, float]:
    """Shrink parts that are longer together than the whole: clocks of two kinds differ a little."""
    total = sum(seconds.values())
    if total <= length or total <= 0:
        return seconds
    return {name: part * length / total for name, part in seconds.items()}
