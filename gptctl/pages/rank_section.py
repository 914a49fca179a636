"""The heat map of ranks over steps, with the ranks that held up the others."""

from __future__ import annotations

import base64

from gptctl.jobs.rank_map import RankMap
from gptctl.pages.heat_picture import LEVELS, colour_of, palette, picture_of, ratio_of
from gptctl.pages.markup import Markup, element, joined
from gptctl.text import count

TALLEST, LOWEST_ROW, TALLEST_ROW = 384, 2, 18  # pixels
NOTABLE = 1.05  # times the median: less is noise
SCALE = (0.7, 0.9, 1.0, 1.1, 1.25, 1.5)


def rank_section(found: RankMap | None) -> Markup | None:
    if found is None or found.num_ranks < 2:
        return None
    return joined(_sentence(found), _picture(found))


def _sentence(found: RankMap) -> Markup:
    slow = [each for each in found.slowest if each.ratio >= NOTABLE]
    if not slow:
        text = f"No rank was more than {NOTABLE - 1:.0%} slower than the median rank."
    else:
        names = ", ".join(f"rank {each.rank} ({each.ratio:.2f} ×)" for each in slow)
        text = f"Slower than the median rank, and so the others waited for them: {names}."
    return element("p", None, text)


def _picture(found: RankMap) -> Markup:
    rows = len(found.rows)
    height = rows * max(LOWEST_ROW, min(TALLEST_ROW, TALLEST // rows))
    data = base64.b64encode(picture_of(found.rows)).decode()
    first, last = found.steps[0][0], found.steps[-1][1]
    group = f", {found.ranks_per_row} ranks per row: the slowest counts"
    label = f"own time of {count(found.num_ranks, 'rank')} over steps {first:,} to {last:,}"
    picture = element(
        "img",
        {
            "class": "heat",
            "src": f"data:image/png;base64,{data}",
            "alt": label,
            "width": "100%",
            "height": height,
            "data-ranks": found.ranks_per_row,
            "data-steps": " ".join(f"{first}-{last}" for first, last in found.steps),
            "data-palette": "".join(f"{r:02x}{g:02x}{b:02x}" for r, g, b in palette()),
            "data-ratios": " ".join(f"{ratio_of(level):.2f}" for level in range(1, LEVELS + 1)),
        },
    )
    return element(
        "figure",
        {"class": "ranks"},
        element("figcaption", None, label, group if found.ranks_per_row > 1 else None),
        element(
            "div",
            {"class": "y-axis"},
            element("span", None, "rank 0"),
            element("span", None, f"{found.num_ranks - 1}"),
        ),
        element("div", {"class": "frame"}, picture),
        element(
            "div",
            {"class": "x-axis"},
            element("span", None, f"step {first:,}"),
            element("span", None, f"{last:,}"),
        ),
    )


def colour_scale() -> Markup:
    """Colours with the ratios that they stand for."""
    boxes = []
    for ratio in SCALE:
        red, green, blue = colour_of(ratio)
        box = element("rect", {"width": 12, "height": 12, "fill": f"rgb({red},{green},{blue})"})
        picture = element("svg", {"width": 12, "height": 12, "aria-hidden": "true"}, box)
        boxes.append(element("span", None, picture, f" {ratio:g} ×"))
    text = "own time, without waiting, against the median rank"
    return element("p", {"class": "legend"}, *boxes, element("span", {"class": "note"}, text))
