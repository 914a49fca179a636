"""The ledger of GPU seconds. Oracle: small histories whose accounts were worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.jobs.costs import since
from gptctl.jobs.ledger import ACCOUNTS, Ledger, ledger_of
from gptctl.jobs.timeline import Allocation, Event, LastStep, Timeline


def event(name: str, time: float, attempt: int = 0, **facts: Any) -> Event:
    return Event(name, time, attempt, facts)


def row(
    step: int, time: float, cost: float, attempt: int = 0, reader: float = 0.0, wait: float = 0.0
) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, "time": time, "step_time": cost, "reader_time": reader, "wait_time": wait}


def history(
    events: list[Event],
    rows: list[dict[str, Any]],
    last: dict[int, LastStep],
    allocations: list[Allocation] | None = None,
    ended: float | None = 100.0,
) -> Timeline:
    starts = [event("attempt", 0.0, 0), event("ranks up", 3.0, 0)]
    return Timeline("job", -5.0, [*starts, *events], allocations or [Allocation(0.0, ended, 4, 0)], rows, last)


def accounts(ledger: Ledger) -> dict[str, float]:
    total = dict.fromkeys(ACCOUNTS, 0.0)
    for attempt in ledger.attempts:
        for name, seconds in attempt.seconds.items():
            total[name] += seconds
    return {name: round(seconds, 6) for name, seconds in total.items() if seconds}


def test_a_run_without_incidents() -> None:
    """10 s start, 20 steps of 2 s (0.1 data, 0.4 waiting), 1 s saving in between, 4 s test run, 45 s nothing."""
    events = [
        event("process group", 5.0),
        event("first step", 10.0, step=1, resumed=0),
        event("checkpoint", 31.0, step=10, stall=1.0),
        event("checkpoint committed", 33.0, step=10),
        event("evaluation", 55.0, seconds=4.0),
        event("finished", 56.0, step=20),
    ]
    rows = [row(10, 30.0, 2.0, reader=0.1, wait=0.4), row(20, 51.0, 2.0, reader=0.1, wait=0.4)]
    ledger = ledger_of(history(events, rows, {0: LastStep(20, 51.0)}), now=1000.0)
    assert accounts(ledger) == {
        "starting": 10.0, "compute": 30.0, "data": 2.0, "wait": 8.0, "checkpoint": 1.0, "evaluation": 4.0, "idle": 45.0,
    }  # fmt: skip
    assert ledger.queued == 5.0
    assert ledger.allocation == 400.0
    assert ledger.goodput == 0.3


def two_attempts(last: int, resumed: int) -> Ledger:
    """One dies at 40 s after `last` steps of 1 s; the next one resumes from `resumed`, and makes 30 in 30 s."""
    events = [
        event("first step", 10.0, step=1, resumed=0),
        event("rank exit", 40.0, rank=1, how="SIGKILL"),
        event("failure", 41.0, reason="rank 1 (node 0): killed"),
        event("attempt", 45.0, 1),
        event("first step", 50.0, 1, step=resumed + 1, resumed=resumed),
        event("finished", 80.0, 1),
    ]
    rows = [row(10, 20.0, 1.0), row(20, 30.0, 1.0), row(resumed + 30, 80.0, 1.0, attempt=1)]
    steps = {0: LastStep(last, 30.0 + last - 20), 1: LastStep(resumed + 30, 80.0)}
    return ledger_of(history(events, rows, steps), now=0.0)


@pytest.mark.parametrize(("last", "resumed"), [(26, 20), (26, 10), (20, 20), (29, 0)])
def test_steps_that_are_done_again(last: int, resumed: int) -> None:
    """Up to the last one of the attempt before, logged or not; the first time they are new."""
    ledger = two_attempts(last, resumed)
    assert [each.repeated_steps for each in ledger.attempts] == [0, last - resumed]
    found = accounts(ledger)
    assert found.get("repeated", 0.0) == last - resumed
    assert found["compute"] == last + 30 - (last - resumed)
    assert ledger.attempts[0].cause == "rank 1 (node 0): killed"
    assert ledger.attempts[0].seconds["starting"] == 10.0


def test_a_hang_is_the_time_without_progress_before_the_failure() -> None:
    events = [
        event("first step", 10.0, step=1, resumed=0),
        event("failed", 80.0, reason="rank 1 makes no progress", idle=60.0),
        event("failure", 82.0, reason="…"),
    ]
    ledger = ledger_of(history(events, [row(10, 20.0, 1.0)], {0: LastStep(10, 20.0)}), now=0.0)
    assert accounts(ledger) == {"starting": 10.0, "compute": 10.0, "hang": 60.0, "idle": 20.0}


def test_a_failure_within_a_step_is_no_hang() -> None:
    events = [event("first step", 10.0, step=1, resumed=0), event("rank exit", 24.0), event("failure", 25.0)]
    ledger = ledger_of(history(events, [row(10, 20.0, 1.0)], {0: LastStep(10, 20.0)}), now=0.0)
    assert accounts(ledger) == {"starting": 10.0, "compute": 10.0, "idle": 80.0}


def test_a_requeued_job_waits_at_no_cost() -> None:
    """Two allocations of 30 s and 40 s, of 4 and 2 GPUs, and 50 s in the queue between them."""
    allocations = [Allocation(0.0, 30.0, 4, 0), Allocation(80.0, 120.0, 2, 1)]
    events = [
        event("first step", 10.0, step=1, resumed=0),
        event("signal", 28.0),
        event("attempt", 80.0, 1),
        event("first step", 90.0, 1, step=11, resumed=10),
    ]
    rows = [row(10, 20.0, 1.0), row(20, 100.0, 1.0, attempt=1)]
    timeline = history(events, rows, {0: LastStep(15, 25.0), 1: LastStep(20, 100.0)}, allocations)
    ledger = ledger_of(timeline, now=500.0)
    assert ledger.queued == 5.0 + 50.0
    assert ledger.allocation == 4 * 30.0 + 2 * 40.0
    assert [each.repeated_steps for each in ledger.attempts] == [0, 5]
    assert sum(ledger.gpu_seconds.values()) == pytest.approx(ledger.allocation)


def test_a_running_job_computes_until_now() -> None:
    events = [event("first step", 10.0, step=1, resumed=0)]
    timeline = history(events, [row(10, 20.0, 1.0)], {0: LastStep(12, 22.0)}, ended=None)
    assert accounts(ledger_of(timeline, now=22.5)) == {"starting": 10.0, "compute": 12.5}


def test_another_program_has_only_a_start_and_an_end() -> None:
    timeline = history([event("rank exit", 60.0)], [], {})
    assert accounts(ledger_of(timeline, now=0.0)) == {"starting": 3.0, "unknown": 57.0, "idle": 40.0}


def test_a_restart_by_torchrun_is_within_the_attempt() -> None:
    """20 steps, then again from step 10 to 30, with 5 s for the restart."""
    events = [event("first step", 10.0, resumed=0), event("first step", 35.0, resumed=10), event("finished", 55.0)]
    rows = [row(20, 30.0, 1.0), row(30, 55.0, 1.0)]
    ledger = ledger_of(history(events, rows, {0: LastStep(30, 55.0)}), now=0.0)
    assert ledger.attempts[0].repeated_steps == 10
    assert accounts(ledger) == {"starting": 15.0, "compute": 30.0, "repeated": 10.0, "idle": 45.0}


def test_only_what_came_after_a_moment() -> None:
    ledger = since(two_attempts(26, 20), 45.0)
    assert [each.attempt for each in ledger.attempts] == [1]
    assert ledger.allocation == 4 * 55.0
    assert sum(ledger.gpu_seconds.values()) == pytest.approx(ledger.allocation)


times = st.floats(0, 200, allow_nan=False)
names = st.sampled_from(
    [
        "attempt",
        "first step",
        "checkpoint",
        "checkpoint committed",
        "evaluation",
        "failure",
        "failed",
        "rank exit",
        "finished",
        "ranks up",
    ]
)
facts = st.fixed_dictionaries(
    {},
    optional={
        "seconds": st.floats(-5, 500),
        "stall": st.floats(-5, 500),
        "resumed": st.integers(-3, 80),
        "step": st.integers(0, 80),
    },
)
any_events = st.lists(st.builds(Event, names, times, st.integers(-1, 3), facts), max_size=25)
any_rows = st.lists(
    st.builds(row, st.integers(0, 80), times, st.floats(0, 50), st.integers(0, 3), st.floats(0, 60), st.floats(0, 60)),
    max_size=25,
)
any_last = st.dictionaries(st.integers(0, 3), st.builds(LastStep, st.integers(0, 90), times), max_size=4)


@settings(max_examples=300, deadline=None)
@given(any_events, any_rows, any_last, st.lists(st.tuples(times, st.floats(0, 90)), max_size=3), st.booleans())
def test_accounts_always_add_up(
    events: list[Event],
    rows: list[dict[str, Any]],
    last: dict[int, LastStep],
    nodes: list[tuple[float, float]],
    is_over: bool,
) -> None:
    """Whatever damaged files, clocks and hosts tell: no account is negative, and the sum is the allocation."""
    allocations, at = list[Allocation](), 0.0
    for start, length in nodes:
        allocations.append(Allocation(at + start, at + start + length, 4, 0))
        at += start + length
    if allocations and not is_over:
        allocations[-1] = allocations[-1]._replace(ended=None)
    ordered = sorted(events, key=lambda each: each.time)
    timeline = Timeline("job", 0.0, ordered, allocations, sorted(rows, key=lambda each: each["time"]), last)
    ledger = ledger_of(timeline, now=700.0)
    expected = sum(4 * ((700.0 if each.ended is None else each.ended) - each.began) for each in allocations)
    assert ledger.allocation == pytest.approx(max(0.0, expected), abs=1e-6)
    assert sum(ledger.gpu_seconds.values()) == pytest.approx(ledger.allocation, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in ledger.gpu_seconds.values())
    assert all(each.repeated_steps >= 0 for each in ledger.attempts)


def test_an_engine_that_was_killed_before_its_attempt_repeats_nothing() -> None:
    """It had the nodes for 15 s; the next one began the attempt, whose 50 steps are new."""
    allocations = [Allocation(2.0, 7.0, 4, 0), Allocation(20.0, 100.0, 4, 0)]
    events = [event("attempt", 21.0, 0), event("first step", 30.0, step=1, resumed=0), event("finished", 80.0)]
    rows = [row(25, 55.0, 1.0), row(50, 80.0, 1.0)]
    timeline = Timeline("job", 0.0, events, allocations, rows, {0: LastStep(50, 80.0)})
    ledger = ledger_of(timeline, now=0.0)
    assert sum(each.repeated_steps for each in ledger.attempts) == 0
    assert accounts(ledger)["compute"] == 50.0
    assert sum(ledger.gpu_seconds.values()) == pytest.approx(ledger.allocation)


def test_records_with_less_than_nothing_give_no_negative_account() -> None:
    events = [event("first step", 10.0, step=1, resumed=0), event("finished", 30.0)]
    timeline = history(events, [row(20, 30.0, 1.0, reader=-5.0, wait=-5.0)], {0: LastStep(20, 30.0)})
    ledger = ledger_of(timeline, now=0.0)
    assert min(accounts(ledger).values()) >= 0
    assert ledger.goodput is not None
    assert ledger.goodput <= 1


def test_what_cannot_be_seen_has_no_goodput() -> None:
    assert ledger_of(history([event("rank exit", 60.0)], [], {}), now=0.0).goodput is None
