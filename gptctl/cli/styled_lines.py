"""Lines for a terminal that know their styles by name, and the width of their characters. Pure.

Whoever draws them decides on colours: `top` is drawn in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gptctl.cli.table_layout import text_width
from gptctl.text import clean

# The names of styles, with the colours of a terminal's first sixteen: they fit its background.
STYLES = {
    "": "",
    "title": "bold",
    "dim": "dim",
    "good": "green",
    "notice": "cyan",
    "warn": "yellow",
    "bad": "red",
    "stopped": "magenta",
    "chosen": "reverse",
}
_SPARKS = "▁▂▃▄▅▆▇█"
_STATES = {"COMPLETED": "good", "RUNNING": "notice", "PENDING": "warn"}
_STATES |= dict.fromkeys(("CANCELLED", "STOPPED"), "stopped")
_STATES |= dict.fromkeys(("LOST", "UNKNOWN", "PREEMPTED"), "warn")


# Letters of Latin scripts, frames, blocks and braille: one column each.
_NARROW = re.compile("[\x20-\x7e\xa1-\xac\xae-\u017f\u2010-\u2027\u2500-\u25ff\u2800-\u28ff]*")


class Styled(NamedTuple):
    text: str
    style: str = ""  # a key of STYLES


StyledLine = tuple[Styled, ...]


def state_style(state: str) -> str:
    return _STATES.get(state, "bad")


def line_of(*parts: Styled | str) -> StyledLine:
    return tuple(part if isinstance(part, Styled) else Styled(part) for part in parts)


def plain_text(line: Iterable[Styled]) -> str:
    return "".join(part.text for part in line)


def cells(text: str) -> int:
    """How many columns a text takes."""
    # Almost every text is narrow, and looking up each character would cost most of the time.
    return len(text) if _NARROW.fullmatch(text) else text_width(text)


def cut(text: str, width: int) -> str:
    """The start of a text in so many columns, with `…` if anything is missing."""
    # Everything that is drawn comes through here: what a job wrote must not control a terminal.
    text = clean(text).replace("\t", " ").replace("\n", " ")
    if len(text) < 2 * width + 1 and cells(text) <= width:
        return text
    taken, room = [], width - 1
    for character in text:
        room -= text_width(character)
        if room < 0:
            break
        taken.append(character)
    return "".join(taken) + "…" if width > 0 else ""


def padded(text: str, width: int, to_right: bool = False) -> str:
    """A text in exactly so many columns."""
    text = cut(text, width)
    space = " " * (width - cells(text))
    return space + text if to_right else text + space


def fit(line: Iterable[Styled], width: int) -> StyledLine:
    """A line of exactly this width."""
    found, room = list[Styled](), width
    for text, style in line:
        if room <= 0:
            break
        shown = cut(text, room)
        room -= cells(shown)
        found.append(Styled(shown, style))
    return (*found, Styled(" " * room)) if room > 0 else tuple(found)


def chosen(line: Iterable[Styled], width: int) -> StyledLine:
    """The line that the keys are about."""
    return (Styled(plain_text(fit(line, width)), "chosen"),)


def page(lines: Sequence[StyledLine], width: int, height: int) -> list[StyledLine]:
    """Exactly so many lines, each of exactly this width."""
    shown = [fit(line, width) for line in lines[:height]]
    return shown + [fit((), width)] * (height - len(shown))


def side_by_side(
    left: Sequence[StyledLine], right: Sequence[StyledLine], width: int, gap: int = 2
) -> list[StyledLine]:
    half = (width - gap) // 2
    height = max(len(left), len(right))
    pairs = zip(page(left, half, height), page(right, half, height))
    return [(*one, Styled(" " * gap), *other) for one, other in pairs]


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line: `█▆▃▂▁`."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[int((value - low) / (high - low) * 7.999)] for value in values)
