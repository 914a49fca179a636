"""One tree from many layers: a file over its `_base_` chain, then every `-o key=value`, then flags.

Later layers win. Every node keeps its own place, so that a finding or a question can name where a value came from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.config.dialects import Translated, copied, switch, translate
from trainer.config.tree import (
    MAX_DEPTH,
    List,
    Map,
    Node,
    Scalar,
    checked_text,
    is_null,
    parse_value,
    plain,
    read_file,
)
from trainer.errors import WRONG_USAGE, Finding, Place, Rule, UserError

MAX_BASES = 50

BASE = Rule("C015", "_base_ names a readable file, and no file is its own base")
INDEX = Rule("C018", "an index points at an item that the list has")


class Override(NamedTuple):
    """`key=value` from the command line; `source` is what the user typed.

    A tuple is a list of words that are taken as they are, as is a `verbatim` value: neither YAML nor blanks count.
    """

    key: str
    value: str | tuple[str, ...]
    source: str
    verbatim: bool = False

    @staticmethod
    def parse(text: str, flag: str = "-o") -> Override:
        key, equals, value = text.partition("=")
        key = key.strip()
        names = key.split(".")
        if not equals or not all(names) or len(names) > MAX_DEPTH:
            hint = "write it as Section.key=value, such as Distributed.mp_degree=2"
            raise UserError(f"{flag} {text[:200]}: not an override".lstrip(), hint, WRONG_USAGE)
        return Override(key, value.strip(), f"{flag} {text}".lstrip())


def _reported(tree: Map) -> Map:
    """The config inside of what `gptctl validate --resolved --json` prints; any other tree as it is."""
    inner = tree.items.get("resolved")
    return inner if isinstance(inner, Map) and {"valid", "findings"} <= set(tree.items) else tree


def load_tree(
    path: str | os.PathLike[str] | None, overrides: Iterable[Override], found: list[Finding]
) -> Map | None:
    """The merged tree of a file (or of nothing) and its overrides; None when the file has no readable tree."""
    layers: list[Translated] = []
    if path is not None:
        tree = read_file(path, found)
        if tree is None:
            return None
        tree = _reported(tree)
        layers = _with_bases(tree, os.fspath(path), [], found)
    of_overrides = [
        translate(_override_tree(override, found), found, implies=False) for override in overrides
    ]
    merged: Node = Map({}, Place(os.fspath(path) if path is not None else "command line"))
    for layer in [layer.implied for layer in layers] + [layer.written for layer in layers]:
        merged = merge(merged, layer, found)
    for override in of_overrides:
        merged = merge(merged, override.written, found, empties=True)
    assert isinstance(merged, Map)
    return merged


def _with_bases(
    tree: Map, path: str, children: Sequence[str], found: list[Finding]
) -> list[Translated]:
    """The file's layer, below it those of its bases."""
    base = tree.items.get("_base_")
    own = Map({key: node for key, node in tree.items.items() if key != "_base_"}, tree.place)
    layer = translate(own, found)
    if base is None or is_null(base):
        return [layer]
    if not isinstance(base, Scalar):
        found.append(
            BASE.found("_base_", None, "one path is needed", "write _base_: base.yaml", base.place)
        )
        return [layer]
    base_path = os.path.join(os.path.dirname(path), base.text)
    chain = [*children, os.path.realpath(path)]
    if len(chain) > MAX_BASES:
        found.append(
            BASE.found(
                "_base_",
                base.text,
                f"a chain of more than {MAX_BASES} files",
                "merge some",
                base.place,
            )
        )
        return [layer]
    if os.path.realpath(base_path) in chain:
        found.append(
            BASE.found(
                "_base_",
                base.text,
                f"{base.text} leads back to itself",
                "break the cycle",
                base.place,
            )
        )
        return [layer]
    try:
        base_tree = read_file(base_path, found)
    except UserError as error:
        hint = "the path is relative to the file that names it"
        found.append(BASE.found("_base_", base.text, error.message, hint, base.place))
        return [layer]
    return [*(_with_bases(base_tree, base_path, chain, found) if base_tree else []), layer]


def _override_tree(override: Override, found: list[Finding]) -> Map:
    place = Place(override.source)
    node = _override_node(override, place, found)
    for name in reversed(override.key.split(".")):
        node = Map({name: node}, place)
    assert isinstance(node, Map)
    return node


def _override_node(override: Override, place: Place, found: list[Finding]) -> Node:
    value = override.value
    if isinstance(value, tuple):
        return List(
            tuple(Scalar(checked_text(word, place, found), place, True) for word in value), place
        )
    if not override.verbatim and value[:1] in ("[", "{", "'", '"'):
        parsed = parse_value(value, override.source, found, first_line=0)
        if parsed is not None:
            return parsed
    return Scalar(checked_text(value, place, found), place, override.verbatim)


def merge(
    under: Node, over: Node, found: list[Finding], empties: bool = False, path: str = ""
) -> Node:
    """Mappings merge key by key; a list takes single items by index; anything else is replaced.

    An empty section in a file says nothing; an empty override (`empties`) takes away what is there.
    """
    if isinstance(over, Map) and is_items(over) and (base := _as_items(under)) is not None:
        return replace_items(base, over, found, path)
    if isinstance(under, Map) and under.items and is_null(over) and not empties:
        return under
    if not isinstance(over, Map):
        return over
    marker = over.items.get("_inherited_")
    inherits = marker is None or switch(marker, "_inherited_", found) is not False
    items = dict(under.items) if isinstance(under, Map) and inherits else {}
    for key, node in over.items.items():
        if key != "_inherited_":
            below = items.get(key, Map({}, node.place))
            items[key] = merge(below, node, found, empties, f"{path}.{key}" if path else key)
    return Map(items, over.place if over.items else under.place)


def is_items(node: Map) -> bool:
    return bool(node.items) and all(
        key.isascii() and key.isdigit() and len(key) < 10 for key in node.items
    )


def _as_items(node: Node) -> Sequence[Node] | None:
    if isinstance(node, List):
        return node.items
    if isinstance(node, Scalar) and re.fullmatch(
        "[0-9, ]*,[0-9, ]*", node.text
    ):  # split: '949,50,1'
        return [Scalar(part.strip(), node.place, node.quoted) for part in node.text.split(",")]
    return [node] if isinstance(node, Scalar) and not node.is_empty else None


def replace_items(base: Sequence[Node], over: Map, found: list[Finding], path: str) -> List:
    items = list(base)
    for key, node in over.items.items():
        if int(key) >= len(items):
            hint = f"use 0 to {len(items) - 1}" if items else "write the whole list"
            found.append(
                INDEX.found(
                    path,
                    plain(node),
                    f"index {int(key)} of a list of {len(items)}",
                    hint,
                    node.place,
                )
            )
        else:
            items[int(key)] = copied(node)
    return List(tuple(items), over.place)
