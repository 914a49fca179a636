"""What the user wrote, before anything was derived: kept in the job's folder for reruns.

A rerun changes some of these values and derives the rest again. `written.json` holds the merged
config (files, flags and overrides) with the place of every value, and the folder that its relative
paths belong to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import read_json
from gptctl.spec.check import NO_PATH
from gptctl.spec.launch import Launch
from trainer.config.kinds import FilePath, Section, keys_of
from trainer.config.read import join
from trainer.config.sections import RunConfig
from trainer.config.tree import MAX_DEPTH, List, Map, Node, Scalar
from trainer.errors import OUT_OF_REACH, Place, UserError
from trainer.named_tuple import NamedTuple

WRITTEN = "written.json"
CODE_PATHS = ("Launch.entrypoint", "Launch.files")
NO_PATHS = (*NO_PATH, "trainer")  # values of such keys that are not paths


class Written(NamedTuple):
    tree: Map
    folder: str  # where gptctl was started


def as_json(tree: Map, folder: str) -> dict[str, Any]:
    return {"folder": folder, "tree": _packed(tree)}


def read_written(run_folder: Path) -> Written | None:
    """What was written for a job; None if an older gptctl has submitted it."""
    file = run_folder / WRITTEN
    return from_json(read_json(file) or {}, str(file)) if file.exists() else None


def from_json(values: Mapping[str, Any], name: str) -> Written:
    """What `as_json` returned; `name` is where it was kept."""
    try:
        tree, folder = _unpacked(values["tree"], MAX_DEPTH), values["folder"]
        if not isinstance(tree, Map) or not isinstance(folder, str):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{name} is damaged", "submit its config again", OUT_OF_REACH) from None
    return Written(tree, folder)


def _packed(node: Node) -> dict[str, Any]:
    at = [node.place.file, node.place.line]
    if isinstance(node, Map):
        return {"map": {key: _packed(item) for key, item in node.items.items()}, "at": at}
    if isinstance(node, List):
        return {"list": [_packed(item) for item in node.items], "at": at}
    # Quoted text is never a number or empty: `name: "1e3"` must stay text.
    return {"quoted" if node.quoted else "text": node.text, "at": at}


def _unpacked(value: dict[str, Any], depth: int) -> Node:
    file, line = value["at"]
    place = Place(_checked(file, str), _checked(line, int))
    # Recursion is bounded: a damaged file may be nested deeper than any config.
    if depth == 0:
        raise ValueError("nested too deep")
    if "map" in value:
        items = _checked(value["map"], dict).items()
        return Map({key: _unpacked(item, depth - 1) for key, item in items}, place)
    if "list" in value:
        return List(tuple(_unpacked(item, depth - 1) for item in value["list"]), place)
    is_quoted = "quoted" in value
    return Scalar(_checked(value["quoted" if is_quoted else "text"], str), place, is_quoted)


def with_absolute_paths(tree: Map, sources: Collection[str], folder: str) -> Map:
    """Make the paths absolute that were typed now: a rerun may be started in another folder."""

    def absolute(node: Node) -> Node:
        if isinstance(node, List):
            return node._replace(items=tuple(absolute(item) for item in node.items))
        if not isinstance(node, Scalar) or node.place.file not in sources:
            return node
        # `-m MODULE` is no path, either.
        if node.is_empty or node.text in NO_PATHS or node.text.startswith("-m "):
            return node
        return node._replace(text=os.path.join(folder, os.path.expanduser(node.text)))

    for path in (*_path_keys(RunConfig, ""), *_path_keys(Launch, "Launch"), *CODE_PATHS):
        tree = _changed(tree, path.split("."), absolute)
    return tree


def _path_keys(cls: type, path: str) -> Iterator[str]:
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            yield from _path_keys(key.kind.cls, join(path, name))
        elif isinstance(key.kind, FilePath):
            yield join(path, name)


def _changed(tree: Map, names: Sequence[str], change: Callable[[Node], Node]) -> Map:
    """A copy of the tree with one node changed, if there is such a node."""
    node = tree.items.get(names[0])
    if node is None:
        return tree
    if len(names) > 1:
        inner = _changed(node, names[1:], change) if isinstance(node, Map) else node
    else:
        inner = change(node)
    return Map({**tree.items, names[0]: inner}, tree.place)


def without(tree: Map, key: str) -> Map:
    """A copy of the tree without a key."""
    *names, last = key.split(".")

    def cut(node: Node) -> Node:
        if not isinstance(node, Map):
            return node
        return Map({name: item for name, item in node.items.items() if name != last}, node.place)

    return _changed(tree, names, cut)


def node_at(tree: Map, key: str) -> Node | None:
    node: Node | None = tree
    for name in key.split("."):
        node = node.items.get(name) if isinstance(node, Map) else None
    return node


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value
