"""HTML and SVG that keep every text where it belongs: only `element` makes tags, and it escapes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple, TypeAlias

from gptctl.text import clean

# Elements without an end tag.
VOID = frozenset(["br", "col", "hr", "img", "input", "link", "meta"])


class Markup(NamedTuple):
    """Finished HTML. Every other text is escaped when it becomes a part of a page."""

    html: str


Child: TypeAlias = "str | Markup | None"
Attributes: TypeAlias = "Mapping[str, str | int | float | bool | None]"


def element(name: str, attributes: Attributes | None = None, *children: Child) -> Markup:
    """An element; attributes that are None or False are left out."""
    start = f"<{name}{''.join(map(_attribute, (attributes or {}).items()))}>"
    if name in VOID:
        return Markup(start)
    return Markup(f"{start}{joined(*children).html}</{name}>")


def joined(*children: Child) -> Markup:
    return Markup("".join(map(_html, children)))


def _attribute(pair: tuple[str, str | int | float | bool | None]) -> str:
    name, value = pair
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'


def _html(child: Child) -> str:
    if child is None:
        return ""
    return child.html if isinstance(child, Markup) else _escaped(child)


def _escaped(text: str) -> str:
    # Half of a surrogate pair cannot be written as UTF-8.
    return escape(clean(text).encode("utf-8", "replace").decode("utf-8"))
