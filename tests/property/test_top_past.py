"""`gptctl top --at`: what is shown of a past moment. Oracles: at the end of time it is what is shown now, and of two
moments the later one knows at least as much."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gptctl.backends import JobState
from gptctl.engine.job_result import FINAL, PENDING, RUNNING
from gptctl.jobs.job_reading import JobReading, LogLine, RankLog
from gptctl.jobs.ledger import ledger_of
from gptctl.jobs.past_reading import past_reading
from gptctl.jobs.rank_times import RankTimes
from gptctl.jobs.store import JobRecord
from gptctl.jobs.timeline import Allocation, Event, LastStep, Timeline
from gptctl.jobs.top_snapshot import detail_of
from gptctl.logs.metric_rows import Row, run_rows

MOMENTS = st.floats(0, 1000)
NAMES = ["started", "attempt", "ranks up", "first step", "checkpoint", "failure", "end", "rank exit", "other"]
FACTS = st.fixed_dictionaries(
    {}, optional={"stall": st.floats(0, 5), "resumed": st.integers(0, 9), "step": st.integers(0, 50)}
)
EVENTS = st.lists(st.builds(Event, st.sampled_from(NAMES), MOMENTS, st.integers(0, 2), FACTS), max_size=12)


@st.composite
def readings(draw: Any) -> JobReading:
    record = JobRecord("gpt-1", "gpt", draw(MOMENTS), "a", "local", "/x", "/x/logs", 1, 2, 2, output_dir="/x/output")
    events = sorted(draw(EVENTS), key=lambda event: event.time)
    state = draw(st.sampled_from([PENDING, RUNNING, *FINAL]))
    times = sorted(draw(st.lists(MOMENTS, max_size=20)))
    rows: list[Row] = [
        {
            "step": draw(st.integers(1, 50)),
            "attempt": draw(st.integers(0, 2)),
            "time": time,
            "loss": 2.0,
            "step_time": 0.1,
            "speed": 10.0,
        }
        for time in times
    ]
    bounds = sorted(draw(st.lists(MOMENTS, max_size=4)))
    allocations = [Allocation(began, ended, 2, 0) for began, ended in zip(bounds[::2], bounds[1::2])]
    if state == RUNNING:
        allocations.append(Allocation(max([0.0, *bounds]), None, 2, 0))
    steps = {0: LastStep(draw(st.integers(1, 60)), draw(MOMENTS))} if draw(st.booleans()) else {}
    timeline = Timeline(
        "gpt-1", record.created, [Event("submitted", record.created, -1, {}), *events], allocations, rows, steps
    )
    ended = draw(st.none() | MOMENTS) if state in FINAL else None
    ranks = draw(st.none() | st.builds(RankTimes, st.just(0), st.just(5), MOMENTS, st.just([1.0, 2.0])))
    lines = tuple(LogLine("x", time) for time in sorted(draw(st.lists(MOMENTS, max_size=5))))
    return JobReading(
        record=record,
        state=JobState(state, "why"),
        ended=ended,
        timeline=timeline,
        run=tuple(run_rows(rows)),
        changed=900.0,
        total=50,
        goodput=ledger_of(timeline, 1000.0).goodput,
        hosts=("a",),
        ranks=ranks,
        log=RankLog(0, lines),
    )


@given(readings())
def test_the_end_of_time_is_now(reading: JobReading) -> None:
    assert detail_of(past_reading(reading, 1000.0), 1000.0) == detail_of(reading, 1000.0)


@given(readings(), MOMENTS, MOMENTS)
def test_later_moments_know_more(reading: JobReading, one: float, other: float) -> None:
    earlier, later = (past_reading(reading, moment) for moment in sorted((one, other)))
    assert [e for e in earlier.timeline.events if e not in later.timeline.events] == []
    assert len(earlier.timeline.rows) <= len(later.timeline.rows)
    assert len(earlier.timeline.allocations) <= len(later.timeline.allocations)
    assert earlier.ended is None or later.ended == earlier.ended
    # A job that was over stays over.
    assert earlier.state.state not in FINAL or later.state == earlier.state


@given(readings(), MOMENTS)
def test_nothing_is_newer_than_the_moment(reading: JobReading, moment: float) -> None:
    past = past_reading(reading, moment)
    if past is reading:
        return
    assert all(event.time <= moment for event in past.timeline.events)
    assert all(row["time"] <= moment for row in (*past.timeline.rows, *past.run))
    assert all(each.began <= moment and (each.ended or 0) <= moment for each in past.timeline.allocations)
    assert all(last.time <= moment for last in past.timeline.last_steps.values())
    # Cutting twice is cutting once.
    assert past_reading(past._replace(state=reading.state, ended=reading.ended), moment).timeline == past.timeline
    detail_of(past, moment)
