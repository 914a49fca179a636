"""A job as it was at a past moment: cuts what is known of it now. Pure.

Whatever was written after the moment is left out, and the state is the one that it had then.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptctl.backends import JobState
from gptctl.engine.file_reading import is_time
from gptctl.engine.job_result import FINAL, LOST, PENDING, RUNNING
from gptctl.jobs.job_reading import JobReading
from gptctl.jobs.ledger import ledger_of
from gptctl.jobs.timeline import Allocation, LastStep, Timeline
from gptctl.logs.metric_rows import Row, run_rows


def past_reading(reading: JobReading, moment: float) -> JobReading:
    """The job at a moment. After its last record it is as it is now.

    Its ranks and its log must be those of the moment already: their files may be too large to be
    read as a whole.
    """
    if moment >= _last_change(reading):
        return reading
    timeline = past_timeline(reading.timeline, moment)
    rows = _until(reading.run, moment)
    # Steps that were trained again later had other rows: those of the timeline have both.
    if len(timeline.rows) < len(reading.timeline.rows) and reading.record.output_dir:
        rows = tuple(run_rows(timeline.rows))
    has_ended = reading.ended is not None and reading.ended <= moment
    return reading._replace(
        state=past_state(reading, moment),
        ended=reading.ended if has_ended else None,
        timeline=timeline,
        run=rows,
        changed=min(reading.changed, moment),
        goodput=ledger_of(timeline, moment, reading.reached).goodput,
    )


def past_timeline(timeline: Timeline, moment: float) -> Timeline:
    """What had happened until then."""
    rows = list(_until(timeline.rows, moment))
    allocations = [_open_at(each, moment) for each in timeline.allocations if each.began <= moment]
    steps = {
        number: step
        for number, last in timeline.last_steps.items()
        if (step := _last_step(last, [row for row in rows if row["attempt"] == number], moment))
    }
    return timeline._replace(
        events=[event for event in timeline.events if event.time <= moment],
        allocations=allocations,
        rows=rows,
        last_steps=steps,
    )


def past_state(reading: JobReading, moment: float) -> JobState:
    state = reading.state
    if _was_over(reading, moment):
        return state
    word = RUNNING if _has_nodes(reading, moment) else PENDING
    # The reason is that of now: it says nothing about then.
    return state if word == state.state else JobState(word)


def _has_nodes(reading: JobReading, moment: float) -> bool:
    begun = [each for each in reading.timeline.allocations if each.began <= moment]
    if not begun:
        return False
    # Of a job without events only its result tells when its last nodes were given back.
    is_last = len(begun) == len(reading.timeline.allocations)
    until = max(begun[-1].ended or 0.0, reading.ended or 0.0) if is_last else begun[-1].ended
    return begun[-1].ended is None or moment < (until or 0.0)


def _was_over(reading: JobReading, moment: float) -> bool:
    if reading.state.state not in FINAL:
        return False
    if reading.ended is not None:
        return reading.ended <= moment
    # Nobody recorded the end of a lost job: it was over when its last nodes were.
    ends = [each.ended for each in reading.timeline.allocations if each.ended is not None]
    return max(ends) <= moment if ends else reading.state.state == LOST


def _last_change(reading: JobReading) -> float:
    """When anything of this reading was written last; open ends are now."""
    if reading.state.state not in FINAL:
        return float("inf")
    timeline = reading.timeline
    times = [
        reading.record.created,
        reading.ended or 0.0,
        *(event.time for event in timeline.events),
        *(each.ended or each.began for each in timeline.allocations),
        *(row["time"] for row in timeline.rows),
        *(last.time for last in timeline.last_steps.values()),
    ]
    return float(max(times))


def _until(rows: Iterable[Row], moment: float) -> tuple[Row, ...]:
    # Rows from a script's log lines have no time, so nobody knows which of them came before.
    return tuple(row for row in rows if _is_until(row.get("time"), moment))


def _is_until(time: object, moment: float) -> bool:
    return is_time(time) and time <= moment


def _open_at(allocation: Allocation, moment: float) -> Allocation:
    is_open = allocation.ended is None or allocation.ended > moment
    return allocation._replace(ended=None) if is_open else allocation


def _last_step(last: LastStep, rows: list[Row], moment: float) -> LastStep | None:
    """The trainer keeps only its very last step: before it, the last logged one is known."""
    if last.time <= moment:
        return last
    return LastStep(rows[-1]["step"], rows[-1]["time"]) if rows else None
