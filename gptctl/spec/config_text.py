"""Write a run config as YAML from overrides, with their origin as comments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from gptctl.spec.launch import Launch
from trainer.config import Override, load_tree
from trainer.config.kinds import Section, keys_of
from trainer.config.sections import RunConfig
from trainer.config.switches import apply_switches
from trainer.config.tree import List, Map, Node, Scalar
from trainer.errors import Finding

MAX_COMMENT = 60  # characters of an origin
# Texts that need no quotes. The reader keeps every value as text, so `true` and `1e-5` need none.
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")
_EMPTY = ("null", "Null", "NULL", "None", "~")


def config_text(overrides: Sequence[Override], base: str = "", head: Sequence[str] = ()) -> str:
    """The YAML of a config that sets what the overrides set; `head` are lines of comment."""
    found: list[Finding] = []
    tree = load_tree(None, overrides, found)
    assert tree is not None
    # Findings are not reported here: the caller has checked the same overrides.
    tree = apply_switches(tree, found)
    lines = [f"# {_one_line(line)}" for line in head] + [""]
    lines += [f"_base_: {_quoted(base)}", ""] if base else []
    sections = {**{name: key.kind for name, key in keys_of(RunConfig).items()}}
    for name in (*sections, "Launch"):
        node = tree.items.get(name)
        kind = sections.get(name)
        cls = kind.cls if isinstance(kind, Section) else Launch
        if isinstance(node, Map) and node.items:
            lines += [f"{name}:", *_section(cls, node, 1), ""]
    return "\n".join(lines)


def _section(cls: type | None, node: Map, depth: int) -> Iterator[str]:
    """The lines of a section, its keys in the order of the reference."""
    keys = keys_of(cls) if cls else {}
    order = [name for name in keys if name in node.items]
    for name in (*order, *(name for name in node.items if name not in keys)):
        yield from _entry(name, keys[name].kind if name in keys else None, node.items[name], depth)


def _entry(name: str, kind: object, node: Node, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Map):
        yield f"{indent}{name}:"
        yield from _section(kind.cls if isinstance(kind, Section) else None, node, depth + 1)
        return
    line = f"{indent}{_quoted(name)}: {_value(node)}"
    origin = _one_line(node.place.file)[:MAX_COMMENT]
    yield f"{line:<44}  # {origin}" if origin else line


def _value(node: Node) -> str:
    if isinstance(node, List):
        return f"[{', '.join(_value(item) for item in node.items)}]"
    assert isinstance(node, Scalar)
    # `--decay_steps None` empties the key; a script's argument `None` is a text.
    return "" if node.is_empty and not node.quoted else _quoted(node.text)


def _quoted(text: str) -> str:
    """A text in YAML; JSON is a subset of it, so strings are quoted as in JSON."""
    is_plain = _PLAIN.fullmatch(text) and text not in _EMPTY
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    """Text for a comment: a line break in it would end the comment."""
    return "".join(each if each.isprintable() else " " for each in text)
