"""Merges the layers of a config: the `_base_` chain, the file, then overrides and flags.

Later layers win. Every node keeps its place, so that messages can say where a value came from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from trainer.config.dialects import Translated, copied, switch, translate
from trainer.config.tree import (
    MAX_DEPTH,
    List,
    Map,
    Node,
    ReadFile,
    Scalar,
    checked_text,
    is_null,
    parse_value,
    plain,
    read_file,
)
from trainer.errors import WRONG_USAGE, Finding, Place, Rule, UserError
from trainer.named_tuple import NamedTuple

MAX_BASES = 50  # files in a chain; limits time if each includes the next

BASE = Rule("C015", "_base_ must name a readable file, and must not lead back to the same file")
INDEX = Rule("C018", "an index must be within the list")


class Override(NamedTuple):
    """`key=value` from the command line; `source` is what the user typed.

    A tuple is a list of words. Tuples and `verbatim` values are used literally: they are not parsed
    as YAML.
    """

    key: str
    value: str | tuple[str, ...]
    source: str
    verbatim: bool = False

    @staticmethod
    def parse(text: str, flag: str = "-o") -> Override:
        key, equals, value = text.partition("=")  # the value itself may contain `=`
        key = key.strip()
        names = key.split(".")
        if not equals or not all(names) or len(names) > MAX_DEPTH:
            hint = "write it as Section.key=value, such as Distributed.mp_degree=2"
            # An input method may have typed a full-width mark.
            if typed := re.search("[＝：]", text):
                plain = text.replace(typed[0], "=", 1)
                hint = f"`{typed[0]}` is a full-width character: write {plain[:200]}"
            raise UserError(f"{flag} {text[:200]}: invalid override".lstrip(), hint, WRONG_USAGE)
        return Override(key, value.strip(), f"{flag} {text}".lstrip())


def _reported(tree: Map) -> Map:
    """The config in the output of `gptctl validate --resolved --json`; other trees unchanged."""
    inner = tree.items.get("resolved")
    return inner if isinstance(inner, Map) and {"valid", "findings"} <= set(tree.items) else tree


def load_tree(
    path: str | os.PathLike[str] | None,
    overrides: Iterable[Override],
    found: list[Finding],
    files: list[ReadFile] | None = None,
) -> Map | None:
    """Merge a file (optional) and overrides into one tree; None if the file has no usable tree.

    All files that were read are added to `files`.
    """
    layers: list[Translated] = []
    if path is not None:
        tree = read_file(path, found, files)
        if tree is None:
            return None
        tree = _reported(tree)
        layers = _with_bases(tree, os.fspath(path), [], found, files)
    merged: Node = Map({}, Place(os.fspath(path) if path is not None else "command line"))
    # What a dialect implies comes first, so that anything written in any file wins over it.
    for layer in [layer.implied for layer in layers] + [layer.written for layer in layers]:
        merged = merge(merged, layer, found)
    assert isinstance(merged, Map)
    return with_overrides(merged, overrides, found)


def with_overrides(tree: Map, overrides: Iterable[Override], found: list[Finding]) -> Map:
    """Merge overrides into a tree; later ones win."""
    merged: Node = tree
    for override in overrides:
        over = translate(_override_tree(override, found), found, implies=False).written
        merged = merge(merged, over, found, empties=True)
    assert isinstance(merged, Map)
    return merged


def _with_bases(
    tree: Map,
    path: str,
    children: Sequence[str],
    found: list[Finding],
    files: list[ReadFile] | None,
) -> list[Translated]:
    """The layers of the file's bases, then its own layer."""
    base = tree.items.get("_base_")
    own = Map({key: node for key, node in tree.items.items() if key != "_base_"}, tree.place)
    layer = translate(own, found)
    if base is None or is_null(base):
        return [layer]
    if not isinstance(base, Scalar):
        found.append(
            BASE.found("_base_", None, "expected one path", "write _base_: base.yaml", base.place)
        )
        return [layer]
    base_path = os.path.join(os.path.dirname(path), base.text)
    chain = [*children, os.path.realpath(path)]  # symbolic links must not hide a cycle
    if len(chain) > MAX_BASES:
        found.append(
            BASE.found(
                "_base_",
                base.text,
                f"more than {MAX_BASES} files in the chain",
                "merge some of the files",
                base.place,
            )
        )
        return [layer]
    if os.path.realpath(base_path) in chain:
        found.append(
            BASE.found(
                "_base_",
                base.text,
                f"{base.text} includes itself, directly or through other files",
                "remove one _base_ of the cycle",
                base.place,
            )
        )
        return [layer]
    try:
        base_tree = read_file(base_path, found, files)
    except UserError as error:
        hint = "the path is relative to the file that contains _base_"
        found.append(BASE.found("_base_", base.text, error.message, hint, base.place))
        return [layer]
    inner = _with_bases(base_tree, base_path, chain, found, files) if base_tree else []
    return [*inner, layer]


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
    # Parse only values that look like YAML lists, mappings or quoted text; others stay as typed.
    if not override.verbatim and value[:1] in ("[", "{", "'", '"'):
        parsed = parse_value(value, override.source, found, first_line=0)
        if parsed is not None:
            return parsed
    return Scalar(checked_text(value, place, found), place, override.verbatim)


def merge(
    under: Node, over: Node, found: list[Finding], empties: bool = False, path: str = ""
) -> Node:
    """Merge two nodes: mappings key by key, list items by index; anything else is replaced.

    An empty section in a file changes nothing. An empty override (`empties`) clears the value.
    """
    if isinstance(over, Map) and is_items(over) and (base := _as_items(under)) is not None:
        return replace_items(base, over, found, path)
    if isinstance(under, Map) and under.items and is_null(over) and not empties:
        return under
    if not isinstance(over, Map):
        return over
    # `_inherited_: False` replaces the section of the base file instead of merging.
    marker = over.items.get("_inherited_")
    inherits = marker is None or switch(marker, "_inherited_", found) is not False
    items = dict(under.items) if isinstance(under, Map) and inherits else {}
    for key, node in over.items.items():
        if key != "_inherited_":
            below = items.get(key, Map({}, node.place))
            items[key] = merge(below, node, found, empties, f"{path}.{key}" if path else key)
    return Map(items, over.place if over.items else under.place)


def is_items(node: Map) -> bool:
    """Whether all keys are indexes, as in `-o Data.Train.dataset.split.0=900`."""
    return bool(node.items) and all(
        key.isascii() and key.isdigit() and len(key) < 10 for key in node.items
    )


def _as_items(node: Node) -> Sequence[Node] | None:
    if isinstance(node, List):
        return node.items
    # A list written as text, as in PaddleNLP: `split: 949,50,1`.
    if isinstance(node, Scalar) and re.fullmatch("[0-9, ]*,[0-9, ]*", node.text):
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
                    f"index {int(key)} is outside the list of {len(items)} items",
                    hint,
                    node.place,
                )
            )
        else:
            items[int(key)] = copied(node)
    return List(tuple(items), over.place)
