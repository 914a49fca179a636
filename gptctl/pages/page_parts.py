"""Small parts of pages: tables, pairs of name and value, badges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gptctl.pages.markup import Child, Markup, element

STYLED = ("cause",)  # columns that have a style of their own
CUT = 400  # characters of a value: whole files would hide the rest


def table(heads: Sequence[str], rows: Iterable[Sequence[Child]], kind: str = "") -> Markup:
    """A table whose first column names the row; a narrow screen scrolls it sideways."""
    head = element("tr", None, *(element("th", {"scope": "col"}, text) for text in heads))
    body = (
        element(
            "tr",
            None,
            element("th", {"scope": "row"}, row[0]),
            *(_cell(head, cell) for head, cell in zip(heads[1:], row[1:])),
        )
        for row in rows
    )
    inner = (element("thead", None, head), element("tbody", None, *body))
    whole = element("table", {"class": kind or None}, *inner)
    return element("div", {"class": "scroll"}, whole)


def _cell(head: str, cell: Child) -> Markup:
    return element("td", {"class": head if head in STYLED else None}, cell)


def pairs(found: Iterable[tuple[str, str]]) -> Markup:
    """Names with their values; those without a value are left out."""
    return element(
        "dl",
        None,
        *(
            element("div", None, element("dt", None, name), element("dd", None, cut(text)))
            for name, text in found
            if text
        ),
    )


def cut(text: str) -> str:
    return text if len(text) <= CUT else f"{text[: CUT - 1]}…"


def folded(title: str, *children: Child, is_open: bool = False) -> Markup:
    """A part that opens on a click."""
    return element("details", {"open": is_open}, element("summary", None, title), *children)


def section(title: str, *children: Child) -> Markup | None:
    """A part of the page; left out if it is empty."""
    inside = [child for child in children if child]
    name = title.lower().replace(" ", "-")
    return element("section", {"id": name}, element("h2", None, title), *inside) if inside else None
