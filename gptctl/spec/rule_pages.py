"""What each rule means, with an example that breaks it and the fix: the pages of templates/rules.

A page is Markdown: `## L002`, a text, and blocks of code whose first line says `wrong` or `fixed`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gptctl.spec.resources import folder

_FENCE = re.compile(r"```(?P<form>\w+) (?P<words>[^\n]+)\n(?P<text>.*?)\n```", re.DOTALL)


class RuleExample(NamedTuple):
    """A block of code: YAML of a config, profile or sweep, or a command."""

    form: str  # yaml or sh
    text: str
    document: str = ""  # empty: a run config; else profile or sweep
    also: tuple[str, ...] = ()  # codes of other rules that it cannot avoid


class RulePage(NamedTuple):
    """The explanation of one rule. Rules about files, hosts and schedulers have no examples."""

    code: str
    meaning: str
    wrong: RuleExample | None = None
    fixed: RuleExample | None = None

    def as_json(self) -> dict[str, str | None]:
        return {
            "meaning": self.meaning,
            "wrong": self.wrong.text if self.wrong else None,
            "fixed": self.fixed.text if self.fixed else None,
        }


def rule_pages() -> dict[str, RulePage]:
    """All pages by code."""
    files = sorted((folder("templates") / "rules").glob("*.md"))
    pages = [page for file in files for page in parse_pages(file.read_text(encoding="utf-8"))]
    return {page.code: page for page in pages}


def parse_pages(text: str) -> list[RulePage]:
    # What comes before the first code is the title of the file.
    parts = re.split(r"^## (\w+)$", text, flags=re.MULTILINE)[1:]
    return [_page(code, body) for code, body in zip(parts[::2], parts[1::2])]


def _page(code: str, body: str) -> RulePage:
    blocks = {}
    for found in _FENCE.finditer(body):
        document, kind, also = _words(found["words"])
        blocks[kind] = RuleExample(found["form"], found["text"], document, also)
    meaning = " ".join(_FENCE.sub("", body).split())
    return RulePage(code, meaning, blocks.get("wrong"), blocks.get("fixed"))


def _words(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Read the words after the fence: `[profile|sweep] wrong|fixed [also CODE …]`."""
    words = text.split()
    document = words.pop(0) if words[0] in ("profile", "sweep") else ""
    kind, *rest = words
    return document, kind, tuple(rest[1:])
