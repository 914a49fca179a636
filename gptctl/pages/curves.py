"""Curves of runs as SVG: they are complete without a script, and hold the numbers that one needs.

Each path is written in the units of its data, x as steps since `origin`, and a matrix moves it into
the picture. So the page has every number once, and the script reads it from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gptctl.logs.metric_rows import Row, is_number
from gptctl.pages.markup import Markup, element, joined
from gptctl.text import count
from gptctl.thinning import Point, thinned

WIDTH, HEIGHT = 1000, 400  # of the picture, in units that the page stretches
NUM_TICKS = 5
LARGEST = 1e30  # beyond that, browsers lose the picture
SMALLEST = 1e-30  # below that, it is drawn as 0
MOST_POINTS = 1600  # of one metric on a page: its runs share them
LEAST_POINTS = 160
MOST_SAMPLES = 200  # points of a run at which its tokens and its time are written
COLOURS = 8  # of runs; then they repeat


class Chart(NamedTuple):
    """What is drawn in one picture: metrics with the same unit."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""


# A metric that no run has is left out.
CHARTS = (
    Chart("loss", ("loss", "valid_loss", "test_loss")),
    Chart("tokens/s", ("ips_total",)),
    Chart("learning rate", ("lr",)),
    Chart("gradient norm", ("grad_norm",)),
    Chart("MFU", ("mfu",)),
    Chart("time of a step", ("step_time", "compute_time"), "s"),
    Chart("waiting for other ranks", ("wait_time",), "s"),
    Chart("waiting for data", ("reader_time",), "s"),
    Chart("loss scale", ("loss_scale",)),
    Chart("memory of the first rank", ("memory",), "B"),
    Chart("GPU utilisation", ("gpu_utilization",), "%"),
    Chart("GPU memory in use", ("gpu_memory",), "B"),
)


class Series(NamedTuple):
    run: int
    metric: str
    parts: list[list[Point]]  # between them the value was not finite
    lost: int  # steps without a finite value

    @property
    def points(self) -> Iterable[Point]:
        return (point for part in self.parts for point in part)


def charts(runs: Sequence[Sequence[Row]]) -> Markup:
    """All pictures of the runs that are compared."""
    origin = min((rows[0]["step"] for rows in runs if rows), default=0)
    last = max((rows[-1]["step"] for rows in runs if rows), default=0)
    most = max(LEAST_POINTS, MOST_POINTS // max(1, len(runs)))
    drawn = [
        _figure(chart, found, origin, last)
        for chart in CHARTS
        if (found := _series_of(chart, runs, most)) and not _is_constant_scale(chart, found)
    ]
    if not drawn:
        return element("p", {"class": "note"}, "No step has been logged.")
    return joined(
        element("div", {"class": "charts", "id": "charts", "data-origin": origin}, *drawn),
        *(_axis_samples(number, rows, origin) for number, rows in enumerate(runs)),
    )


def _is_constant_scale(chart: Chart, found: Sequence[Series]) -> bool:
    """Only in half precision the loss is scaled."""
    return chart.title == "loss scale" and len({y for each in found for _, y in each.points}) == 1


def _series_of(chart: Chart, runs: Sequence[Sequence[Row]], most: int) -> list[Series]:
    found = [
        _series(number, metric, rows, most)
        for metric in chart.metrics
        for number, rows in enumerate(runs)
    ]
    return [each for each in found if each.parts]


def _series(run: int, metric: str, rows: Sequence[Row], most: int) -> Series:
    known = [(row["step"], _settled(row[metric])) for row in rows if metric in row]
    parts = [
        list(group)
        for is_drawn, group in groupby(known, key=lambda point: _is_drawn(point[1]))
        if is_drawn
    ]
    points = sum(map(len, parts))
    # Each part gets its share, but no more parts are drawn than points.
    kept = [thinned(part, max(4, most * len(part) // points)) for part in parts[:most]]
    return Series(run, metric, kept, len(known) - points)


def _settled(value: Any) -> Any:
    # Numbers near the smallest ones of all cannot be divided by.
    return 0.0 if is_number(value) and abs(value) < SMALLEST else value


def _is_drawn(value: Any) -> bool:
    return is_number(value) and abs(value) < LARGEST


def _figure(chart: Chart, found: Sequence[Series], origin: int, last: int) -> Markup:
    values = [y for each in found for _, y in each.points]
    low, high = bounds(min(values), max(values))
    right = max(1, last - origin)
    scale = (WIDTH / right, -HEIGHT / (high - low))
    matrix = f"matrix({scale[0]:.6g} 0 0 {scale[1]:.6g} 0 {-high * scale[1]:.6g})"
    lines = [
        element(
            "path",
            {
                "class": f"line run-{each.run % COLOURS} metric-{chart.metrics.index(each.metric)}",
                "data-run": each.run,
                "data-metric": each.metric,
                "d": path_of(each.parts, origin),
            },
        )
        for each in found
    ]
    label = f"{chart.title}: from {number_text(min(values))} to {number_text(max(values))}"
    picture = element(
        "svg",
        {
            "class": "plot",
            "viewBox": f"0 0 {WIDTH} {HEIGHT}",
            "preserveAspectRatio": "none",
            "role": "img",
            "aria-label": label,
        },
        element("path", {"class": "grid", "d": _grid()}),
        element("g", {"class": "lines", "transform": matrix}, *lines),
    )
    y_ticks = [number_text(high - (high - low) * part, chart.unit) for part in _parts()]
    x_ticks = [f"{origin + round(right * part):,}" for part in _parts()]
    return element(
        "figure",
        {"class": "chart", "data-unit": chart.unit},
        element("figcaption", None, element("b", None, chart.title), *_caption(chart, found)),
        element("div", {"class": "y-axis"}, *(element("span", None, text) for text in y_ticks)),
        element("div", {"class": "frame"}, picture),
        element("div", {"class": "x-axis"}, *(element("span", None, text) for text in x_ticks)),
    )


def _caption(chart: Chart, found: Sequence[Series]) -> Iterable[Markup]:
    """The last value of each metric; dashes tell metrics apart, colours runs."""
    if len({each.run for each in found}) == 1:
        for each in found:
            step, value = each.parts[-1][-1]
            name = f"{each.metric} " if len(found) > 1 else ""
            text = f"{name}{number_text(value, chart.unit)} at step {step:,}"
            kind = f"last metric-{chart.metrics.index(each.metric)}"
            yield element("span", {"class": kind}, text)
    elif len({each.metric for each in found}) > 1:
        for number, metric in enumerate(chart.metrics):
            yield element("span", {"class": f"last metric-{number}"}, metric)
    if lost := sum(each.lost for each in found):
        yield element("span", {"class": "last bad"}, f"{count(lost, 'step')} not finite")


def path_of(parts: Iterable[Sequence[Point]], origin: int) -> str:
    """Points as an SVG path: `M0 2.5 10 2.25`; a single one as a dot."""
    return "".join(
        f"M{_written(part, origin)}{'' if len(part) > 1 else 'h0'}" for part in parts if part
    )


def _written(part: Sequence[Point], origin: int) -> str:
    return " ".join(f"{step - origin} {value:.6g}" for step, value in part)


def _grid() -> str:
    across = (round(HEIGHT * part, 1) for part in _parts())
    down = (round(WIDTH * part, 1) for part in _parts())
    return "".join([f"M0 {y:g}H{WIDTH}" for y in across] + [f"M{x:g} 0V{HEIGHT}" for x in down])


def _parts() -> list[float]:
    return [number / (NUM_TICKS - 1) for number in range(NUM_TICKS)]


def bounds(low: float, high: float) -> tuple[float, float]:
    """Round numbers around values, so that the ticks between them are short, too.

    The script has the same function.
    """
    if not high > low:
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    step = (high - low) / (NUM_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(step))
    for size in (unit, 2 * unit, 2.5 * unit, 5 * unit, 10 * unit, 20 * unit):
        first = math.floor(low / size) * size
        if first + (NUM_TICKS - 1) * size >= high:
            return first, first + (NUM_TICKS - 1) * size
    return low, high


def number_text(value: float, unit: str = "") -> str:
    """A number with at most four digits: `12.5k`, `3.00e-4`; as `numberText` in the script."""
    if unit == "%":
        return f"{value:.0f}%"
    size = abs(value)
    for limit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit and size < 1e15:
            divisor = 1e3 if sign == "k" else limit
            return f"{value / divisor:.4g}{' ' if unit else ''}{sign}{unit}"
    if size and not 1e-3 <= size < 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def _axis_samples(run: int, rows: Sequence[Row], origin: int) -> Markup | None:
    """Tokens and seconds of a run at some of its steps, for other x axes."""
    found, began, seconds = [], None, 0.0
    for row in rows:
        tokens, moment = row.get("tokens"), row.get("time")
        if not is_number(tokens) or not is_number(moment):
            continue
        began = moment if began is None else began
        # A clock may have been set back: a step is never before an earlier one.
        seconds = max(seconds, moment - began)
        found.append((row["step"], tokens, seconds))
    if len(found) < 2:
        return None
    some = [found[len(found) * number // MOST_SAMPLES] for number in range(MOST_SAMPLES)]
    kept = sorted({*(found if len(found) <= MOST_SAMPLES else some), found[0], found[-1]})
    text = " ".join(f"{step - origin},{tokens:.9g},{passed:.6g}" for step, tokens, passed in kept)
    return element("div", {"class": "knots", "data-run": run, "data-knots": text, "hidden": True})
