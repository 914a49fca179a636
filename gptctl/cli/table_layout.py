"""Fit a table into a window: which of its columns are shown, and how wide they are.

Pure: numbers and text in, widths out. `ui.py` draws the table.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from trainer.named_tuple import NamedTuple

GAP = 2  # between two columns
EDGES = 2  # one character left and one right of the table
# Characters that a text needs at least. Of a text that is cut, nothing else is shown.
SHORTEST = {"wrap": 16, "cut": 32}


_TIME = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d)")


class Column(NamedTuple):
    """A column of a table. Only a terminal wraps, cuts or hides; a pipe gets everything."""

    name: str
    # keep: never broken, such as a time; wrap: on several lines; cut: one line that ends with `…`.
    fit: Literal["keep", "wrap", "cut"] = "keep"
    # 0: always shown. Others are added in this order while there is room, unless they are empty;
    # columns of the same number are shown together or not at all.
    importance: int = 0
    colour: str = ""  # of its cells


def as_columns(columns: Sequence[str | Column]) -> list[Column]:
    """Columns given by name are kept in one piece; the last one is wrapped."""
    last = len(columns) - 1
    return [
        each if isinstance(each, Column) else Column(each, "wrap" if index == last else "keep")
        for index, each in enumerate(columns)
    ]


def text_width(text: str) -> int:
    """Return how many columns of a terminal the longest line of a text takes."""
    return max((sum(map(_character_width, line)) for line in text.split("\n")), default=0)


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int
) -> dict[int, int] | None:
    """Return the widths of the columns to show, by index; None if they do not fit."""
    content = [
        max((text_width(row[index]) for row in cells), default=0) for index in range(len(columns))
    ]
    least = [_least(column, size) for column, size in zip(columns, content)]
    shown = {index: least[index] for index, column in enumerate(columns) if not column.importance}
    if _total(shown) > width:
        return None
    for number in sorted({column.importance for column in columns} - {0}):
        more = {
            index: least[index]
            for index, column in enumerate(columns)
            if column.importance == number and content[index]
        }
        if _total({**shown, **more}) <= width:
            shown |= more
    shown = _widened(dict(sorted(shown.items())), content, width - _total(shown))
    for index in shown:
        whole = {**shown, index: max(shown[index], text_width(columns[index].name))}
        shown = whole if _total(whole) <= width else shown
    return shown


def _least(column: Column, content: int) -> int:
    """Return the least width of a column. Its name may be broken between words."""
    word = max(map(text_width, column.name.split(" ")))
    return max(word, min(content, SHORTEST.get(column.fit, content)))


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1) + EDGES


def _widened(widths: dict[int, int], wanted: Sequence[int], spare: int) -> dict[int, int]:
    """Share what is left of the window: one character at a time, to whoever lacks something."""
    widths = dict(widths)
    while spare and (lacking := [index for index in widths if widths[index] < wanted[index]]):
        for index in lacking[:spare]:
            widths[index] += 1
        spare = max(0, spare - len(lacking))
    return widths


def broken_name(name: str, width: int) -> str:
    """Break the name of a column between words if the column is narrower."""
    return name if text_width(name) <= width else name.replace(" ", "\n")


def wrapped(text: str, width: int) -> str:
    """Wrap the lines of a text, but no time in it, nor words that are longer than a line.

    The rest of a list item is indented like its first line.
    """
    import textwrap

    lines = []
    # textwrap does not break a line at this space.
    for line in _TIME.sub("\\1\u00a0\\2", text).split("\n"):
        start = len(line) - len(line.lstrip(" ·"))
        lines += textwrap.wrap(
            line,
            max(width, start + 8),
            subsequent_indent=" " * start,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace("\u00a0", " ")
