"""All jobs as `gptctl top` shows them: one row each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gptctl.cli.styled_lines import (
    Styled,
    StyledLine,
    cells,
    chosen,
    line_of,
    padded,
    sparkline,
    state_style,
)
from gptctl.engine.job_result import COMPLETED, PENDING, RUNNING
from gptctl.jobs.top_snapshot import JobSummary, averaged
from gptctl.text import count, duration

LARGE = 1e9
LONGEST_JOB = 28
LONGEST_CELL = 20
LEAST_CURVE = 8  # columns


class Field(NamedTuple):
    """A column of numbers, as wide as its widest cell."""

    name: str
    text: Callable[[JobSummary], str]
    importance: int  # 0: always shown; the others are added in this order while there is room

    def width(self, jobs: Sequence[JobSummary]) -> int:
        return max(len(self.name), *(min(LONGEST_CELL, cells(self.text(job))) for job in jobs))


def number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    # A diverging loss can have any number of digits.
    return format(value, form if abs(value) < LARGE else ".3g")


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def steps_text(job: JobSummary) -> str:
    if job.step is None:
        return ""
    return f"{job.step:,}" + (f"/{job.total:,}" if job.total else "")


FIELDS = (
    Field("done", lambda job: "" if job.percent is None else f"{job.percent}%", 0),
    Field("step", steps_text, 4),
    Field("left", lambda job: "" if job.left is None else duration(job.left), 1),
    Field("time", lambda job: "" if job.duration is None else duration(job.duration), 5),
    Field("tokens/s", lambda job: number(job.tokens_per_second, ",.0f"), 2),
    Field("goodput", lambda job: percent(job.goodput), 3),
    Field("loss", lambda job: number(job.loss, ".4f"), 1),
)
STATE = 9  # the width of COMPLETED and CANCELLED; longer states are cut


def jobs_lines(
    jobs: Sequence[JobSummary], selected: str | None, width: int, height: int
) -> list[StyledLine]:
    """The table, with the reason of the selected job below it."""
    if not jobs:
        return [line_of(Styled("no jobs", "dim"))]
    current = next((job for job in jobs if job.job == selected), None)
    reason = current.reason if current else ""
    rows = max(1, height - 1 - (2 if reason else 0))
    name = min(LONGEST_JOB, max(8, *(cells(job.job) for job in jobs)))
    fields = fitting(jobs, width - name - STATE - 2)
    position = jobs.index(current) if current else 0
    first = max(0, min(position - rows // 2, len(jobs) - rows))
    lines = [heading(name, fields, width)]
    for job in jobs[first : first + rows]:
        line = row(job, name, fields, width)
        lines.append(chosen(line, width) if job is current else line)
    if reason and current:
        lines += [line_of(""), line_of(f"{current.job}: ", Styled(reason, "dim"))]
    return lines


def fitting(jobs: Sequence[JobSummary], width: int) -> list[tuple[Field, int]]:
    """The fields for which there is room beside a curve, with their widths."""
    shown = [field for field in FIELDS if not field.importance]
    for level in sorted({field.importance for field in FIELDS} - {0}):
        more = [field for field in FIELDS if field.importance == level or field in shown]
        if sum(2 + field.width(jobs) for field in more) + 2 + LEAST_CURVE <= width:
            shown = more
    return [(field, field.width(jobs)) for field in shown]


def heading(name: int, fields: Sequence[tuple[Field, int]], width: int) -> StyledLine:
    names = [padded("job", name), padded("state", STATE)]
    names += [padded(field.name, size, to_right=True) for field, size in fields]
    return (Styled(padded("  ".join([*names, "curve"]), width), "dim"),)


def row(job: JobSummary, name: int, fields: Sequence[tuple[Field, int]], width: int) -> StyledLine:
    parts = [
        Styled(padded(job.job, name) + "  "),
        Styled(padded(job.state, STATE), state_style(job.state)),
    ]
    # Where there are no numbers to follow, the reason says more.
    shown = fields if job.state in (RUNNING, COMPLETED) or not job.reason else fields[:1]
    for field, size in shown:
        parts.append(Styled("  " + padded(field.text(job), size, to_right=True)))
    if shown is not fields:
        return (*parts, Styled(f"  {job.reason}", "dim"))
    room = width - sum(cells(part.text) for part in parts) - 2
    # All of the curve, however short: its end alone would be noise.
    curve = averaged(job.losses, room) if room > 0 else ()
    return (*parts, Styled("  " + sparkline(curve), "notice"))


def totals(jobs: Sequence[JobSummary]) -> str:
    counts = Counter(job.state for job in jobs)
    # What may still change comes first.
    order = [RUNNING, PENDING, *sorted(counts, key=lambda state: -counts[state])]
    shown = [state for state in dict.fromkeys(order) if counts[state]]
    states = ", ".join(f"{counts[state]:,} {state.lower()}" for state in shown)
    return f"{count(len(jobs), 'job')}{': ' if states else ''}{states}"
