"""Curves as text, drawn by plotext. `legend` is pure; only `draw` needs plotext."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gptctl.thinning import thinned
from trainer.errors import OUT_OF_REACH, UserError, install_line

COLOURS = (6, 3, 5, 2, 4, 1)  # of a terminal's first sixteen, which fit its background
# Without colours, each of several curves has a character of its own.
CHARACTERS = "*+ox#@"
LEAST = 8  # lines of a chart
NUM_TICKS = 5
SMALLEST = 1e-200


class Curve(NamedTuple):
    name: str
    steps: Sequence[int]
    values: Sequence[float]


class ChartSize(NamedTuple):
    width: int
    height: int  # including the legend


def draw(title: str, curves: Sequence[Curve], size: ChartSize, coloured: bool) -> str:
    """Draw curves over steps, with a legend below them."""
    plot = _plotext()
    plot.clear_figure()
    plot.theme("clear")
    plot.plot_size(size.width, max(LEAST, size.height - len(curves)))
    for number, curve in enumerate(curves):
        points = thinned(list(zip(curve.steps, curve.values)), 4 * size.width)
        # plotext cannot scale the smallest numbers of all.
        steps, values = zip(*((x, y if abs(y) > SMALLEST else 0.0) for x, y in points))
        # Dots of braille make the finest curve, but all of them look alike.
        is_fine = coloured or len(curves) == 1
        marker = "braille" if is_fine else CHARACTERS[number % len(CHARACTERS)]
        colour = COLOURS[number % len(COLOURS)] if coloured else "default"
        plot.plot(steps, values, marker=marker, color=colour)
    ticks = step_ticks(curves)
    plot.xticks(ticks, [f"{step:,}" for step in ticks])
    plot.title(title)
    plot.xlabel("step")
    picture = plot.build() if coloured else plot.uncolorize(plot.build())
    lines = [line.rstrip() for line in picture.rstrip("\n").split("\n")]
    return "\n".join([*lines, *legend(curves, coloured)]) + "\n"


def _plotext() -> Any:
    hint = f"{install_line('ui')}; --json prints the numbers without it"
    try:
        import plotext
    except ImportError:
        raise UserError("plotext is not installed", hint, OUT_OF_REACH) from None
    # Version 6 has none of these functions.
    if not hasattr(plotext, "clear_figure"):
        raise UserError("this version of plotext is not supported", hint, OUT_OF_REACH)
    return plotext


def step_ticks(curves: Sequence[Curve]) -> list[int]:
    """Choose steps for the axis; plotext would choose fractions."""
    first = min(curve.steps[0] for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    parts = NUM_TICKS - 1
    return sorted({first + (last - first) * number // parts for number in range(parts + 1)})


def legend(curves: Sequence[Curve], coloured: bool) -> list[str]:
    """`** gpt-3f9a2c  2.7881 at step 500`"""
    width = max(len(curve.name) for curve in curves)
    lines = []
    for number, curve in enumerate(curves):
        mark = CHARACTERS[number % len(CHARACTERS)] * 2 if len(curves) > 1 else "⠤⠤"
        if coloured:
            mark = f"\x1b[38;5;{COLOURS[number % len(COLOURS)]}m━━\x1b[0m"
        lines.append(
            f"{mark} {curve.name:<{width}}  {curve.values[-1]:.6g} at step {curve.steps[-1]:,}"
        )
    return lines
