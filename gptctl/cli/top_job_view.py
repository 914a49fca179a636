"""One job as `gptctl top` shows it: curves, ranks, events and the log of a rank.

Pure, except that drawing a curve tries whether plotext is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gptctl.cli.chart import ChartSize, Curve, draw
from gptctl.cli.styled_lines import (
    Styled,
    StyledLine,
    line_of,
    side_by_side,
    sparkline,
    state_style,
)
from gptctl.cli.top_jobs_view import number, percent, steps_text
from gptctl.cli.top_rank_grid import rank_lines
from gptctl.engine.job_result import FINAL
from gptctl.jobs.job_reading import RankLog
from gptctl.jobs.top_snapshot import JobDetail, MetricCurve, averaged
from gptctl.logs.progress import evaluation_text, step_text
from gptctl.text import clock_time, count, duration, size_text
from trainer.errors import UserError
from trainer.logline import PREFIX, parse_evaluation_line, parse_train_line

SMALLEST_CHART = 8  # lines; a lower one has no room for its axis
BESIDE_CHARTS = 10  # lines that everything else needs
WIDE = 120  # columns from which on events and log are side by side
NARROWEST_PAIR = 60  # columns for two charts side by side
TALLEST_CHART = 18


def job_lines(detail: JobDetail, scroll: int, width: int, height: int) -> list[StyledLine]:
    """Everything about a job, in exactly as many lines as there are, or less."""
    above = _above_log(detail, width, height)
    return [*above, *_events_and_log(detail, scroll, width, height - len(above))]


def most_scroll(detail: JobDetail, width: int, height: int) -> int:
    """How many lines of the log are above those that the window has room for."""
    left = height - len(_above_log(detail, width, height))
    if left >= 2 and width < WIDE:
        left -= len(event_lines(detail, _events_height(left)))
    return _above_end(detail.log, left) if detail.log and left >= 2 else 0


def _above_log(detail: JobDetail, width: int, height: int) -> list[StyledLine]:
    """What is above events and log, and leaves the rest of the lines to them."""
    head = header(detail)
    left = height - len(head)
    # A small window gets small charts, a very small one a line for each.
    room = SMALLEST_CHART if left >= SMALLEST_CHART + BESIDE_CHARTS else 0
    charts = chart_lines(detail, width, min(TALLEST_CHART, max(room, left * 2 // 5)))
    left -= len(charts)
    # A thousand ranks fit into eight lines of a wide window, and into few of a small one.
    ranks = rank_lines(detail, width, max(3, min(10, left // 3)))[:left]
    return [*head, *charts, *ranks]


def header(detail: JobDetail) -> list[StyledLine]:
    job = detail.summary
    speed = number(job.tokens_per_second, ",.0f")
    first = [
        "" if job.percent is None else f"{job.percent}%",
        f"step {steps_text(job)}" if job.step is not None else "",
        "" if job.left is None else f"{duration(job.left)} left",
        f"{speed} tokens/s" if speed else "",
        f"loss {number(job.loss, '.4f')}" if job.loss is not None else "",
    ]
    lines = [line_of(Styled(job.state, state_style(job.state)), *_joined(first))]
    valid = number(job.valid_loss, ".4f")
    memory, gpu_memory = detail.memory, detail.gpu_memory
    second = [
        f"{count(job.world, 'rank')} on {job.cluster}",
        "" if job.duration is None else f"time {duration(job.duration)}",
        f"valid loss {valid}" if valid else "",
        f"goodput {percent(job.goodput)}" if job.goodput is not None else "",
        f"memory peak {size_text(int(memory))}" if memory else "",
        f"GPU memory in use {size_text(int(gpu_memory))}" if gpu_memory else "",
    ]
    lines.append(line_of(*_joined(second)[1:]))
    if job.reason:
        lines.append(line_of(Styled(job.reason, "dim")))
    return lines


def _joined(texts: Sequence[str]) -> list[Styled]:
    return [part for text in texts if text for part in (Styled("  "), Styled(text))]


def chart_lines(detail: JobDetail, width: int, height: int) -> list[StyledLine]:
    """The curves of the loss and of tokens/s."""
    if not detail.loss.steps and not detail.tokens_per_second.steps:
        return [line_of(Styled(_no_step(detail.summary.state), "dim"))]
    curves = (("loss", detail.loss), scaled("tokens/s", detail.tokens_per_second))
    if height < SMALLEST_CHART or width < NARROWEST_PAIR:
        return _small_charts(curves, width)
    left, right = (_chart(name, curve, (width - 2) // 2, height) for name, curve in curves)
    if left is None or right is None:
        return _small_charts(curves, width)
    return side_by_side(left, right, width)


def scaled(name: str, curve: MetricCurve) -> tuple[str, MetricCurve]:
    """With short numbers at the axis."""
    high = max(curve.values, default=0.0)
    for size, word in ((1e6, "million "), (1e3, "thousand ")):
        if high >= 10 * size:
            return word + name, curve._replace(values=tuple(v / size for v in curve.values))
    return name, curve


def _small_charts(curves: Sequence[tuple[str, MetricCurve]], width: int) -> list[StyledLine]:
    """A line for each curve, where there is no room for more, and without plotext."""
    return [
        line_of(
            Styled(f"{name:<18}" if len(name) > 9 else f"{name:<9}", "title"),
            Styled(sparkline(averaged(curve.values, max(8, width - 12))) or "-", "notice"),
        )
        for name, curve in curves
    ]


def _chart(name: str, curve: MetricCurve, width: int, height: int) -> list[StyledLine] | None:
    if not curve.steps:
        return [line_of(Styled(f"no {name}", "dim"))]
    lines = _drawn(name, curve, width, height)
    # The picture is of one colour: the axis is read as text, too.
    return [line_of(Styled(text, "notice")) for text in lines] if lines else None


# Keys are drawn at once: the picture changes only with the steps.
@lru_cache(maxsize=8)
def _drawn(name: str, curve: MetricCurve, width: int, height: int) -> tuple[str, ...] | None:
    # The label of the axis and the legend are left out: the header has the newest numbers.
    size = ChartSize(width, height + 2)
    try:
        text = draw(name, [Curve(name, curve.steps, curve.values)], size, coloured=False)
    except UserError:  # plotext is missing
        return None
    return tuple(text.rstrip("\n").split("\n")[:-2])


def _events_and_log(detail: JobDetail, scroll: int, width: int, height: int) -> list[StyledLine]:
    """Events and the log of a rank."""
    if height < 2:
        return []
    if width >= WIDE:
        left = event_lines(detail, height)
        return side_by_side(left, log_lines(detail, scroll, height), width)
    events = event_lines(detail, _events_height(height))
    return [*events, *log_lines(detail, scroll, height - len(events))]


def _events_height(height: int) -> int:
    return max(2, height // 3)


def event_lines(detail: JobDetail, height: int) -> list[StyledLine]:
    lines = [line_of(Styled("events", "title"))]
    today = clock_time(detail.time)[:10]
    for event in detail.events[-(height - 1) :]:
        day, clock = clock_time(event.time).split()
        when = clock if day == today else f"{day[5:]} {clock[:5]}"
        lines.append(
            line_of(Styled(f"{when}  ", "dim"), Styled(event.text, "bad" if event.is_bad else ""))
        )
    return lines


def log_lines(detail: JobDetail, scroll: int, height: int) -> list[StyledLine]:
    if height < 1:
        return []
    if detail.log is None:
        return [line_of(Styled("log", "title"), Styled("  left/right or a number: a rank", "dim"))]
    texts = [short_line(line.text, detail.summary.total or 0) for line in detail.log.lines]
    offset = min(scroll, _above_end(detail.log, height))
    end = len(texts) - offset
    above = f", {count(offset, 'line')} further up" if offset else ""
    shown = texts[max(0, end - (height - 1)) : end] or ["nothing yet"]
    title = line_of(Styled(f"log of rank {detail.log.rank}", "title"), Styled(above, "dim"))
    return [title, *(line_of(text) for text in shown)]


def _above_end(log: RankLog, height: int) -> int:
    """How many lines are above the last ones, which fit below the title."""
    return max(0, len(log.lines) - max(0, height - 1))


def _no_step(state: str) -> str:
    return "no step was logged" if state in FINAL else "no step has been logged yet"


def short_line(text: str, total: int) -> str:
    """A line of a log without what the whole screen says already."""
    if line := parse_train_line(text):
        body = step_text(line, total)
    elif evaluation := parse_evaluation_line(text):
        body = evaluation_text(evaluation, total)
    else:
        body = PREFIX.sub("", f"{text} ").strip()
    prefix = PREFIX.match(f"{text} ")
    if not prefix:
        return text.rstrip()  # a traceback needs its indentation
    level = "" if prefix[2] == "INFO" else f"{prefix[2]}: "
    return f"{prefix[1]}  {level}{body}"
