"""From a tree to typed values: every key read by its kind, every unknown key reported with the nearest known one.

Values are flat, by key path (`Model.hidden_size`); a section object is built when all of them are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from trainer.config.dialects import RENAMED, is_paddle_only
from trainer.config.kinds import WRONG_TYPE, BadValue, Choice, Integers, Key, Kind, Names, Section, Words, keys_of
from trainer.config.layers import is_items, replace_items
from trainer.config.tree import Map, Node, Scalar, is_null, plain
from trainer.errors import Finding, Place, Rule, closest

UNKNOWN = Rule("C010", "every key is known")

T = TypeVar("T")


class Reading:
    """What was read so far: values by key path, where they were written, and what was wrong."""

    def __init__(self, found: list[Finding]) -> None:
        self.found = found
        self.values: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.emptied: set[str] = set()  # written, but with nothing behind the colon
        self.bad: set[str] = set()
        self.ignored: dict[str, Place] = {}  # Paddle's own keys

    def place_of(self, *paths: str) -> Place | None:
        """Where the first of these keys that is written at all was written."""
        return next((self.places[path] for path in paths if path in self.places), None)

    def is_bad(self, path: str) -> bool:
        return any(bad == path or bad.startswith(path + ".") or path.startswith(bad + ".") for bad in self.bad)


def read_root(sections: Mapping[str, type], tree: Map, reading: Reading, unread: tuple[str, ...] = ()) -> None:
    """Reads the sections of a whole config; `unread` sections belong to another program."""
    keys = {name: Key(Section(cls), None, "") for name, cls in sections.items()}
    rest = Map({name: node for name, node in tree.items.items() if name not in unread}, tree.place)
    _read_keys(keys, rest, "", reading, sections)


def read_section(cls: type, node: Map, reading: Reading) -> None:
    """Reads a document that is one section, such as a cluster profile."""
    _read_keys(keys_of(cls), node, "", reading, {"": cls})


def _read_keys(keys: Mapping[str, Key], node: Map, path: str, reading: Reading, root: Mapping[str, type]) -> None:
    for name, child in node.items.items():
        child_path = f"{path}.{name}" if path else name
        if name in keys:
            reading.places[child_path] = child.place
            _read_key(keys[name], child, child_path, reading, root)
        elif is_paddle_only(child_path):
            reading.ignored[child_path] = child.place
        else:
            near = closest(name, keys)
            # A rule must not judge the default of a key that was written, only misspelt.
            reading.bad |= {child_path, *(f"{path}.{other}" if path else other for other in near)}
            hint = f"did you mean {near[0]}?" if near else _suggestion(name, keys, root)
            where = f"{path} has no key {name}" if path else f"there is no section or key {name}"
            reading.found.append(UNKNOWN.found(child_path, plain(child), where, hint, child.place))


def _read_key(key: Key, node: Node, path: str, reading: Reading, root: Mapping[str, type]) -> None:
    kind = key.kind
    if isinstance(kind, Section):
        _read_nested(kind, node, path, reading, root)
    elif is_null(node) and not _means_none(kind, node):
        reading.emptied.add(path)
    else:
        if isinstance(kind, Names) and isinstance(node, Map):
            reading.places.update({f"{path}.{name}": item.place for name, item in node.items.items()})
        try:
            reading.values[path] = kind.read(_with_default_items(key, node, reading))
        except BadValue as bad:
            reading.bad.add(path)
            full = f"{path}.{bad.key}" if bad.key else path
            reading.found.append(bad.rule.found(full, plain(node), bad.message, bad.hint, bad.place or node.place))


def _read_nested(kind: Section, node: Node, path: str, reading: Reading, root: Mapping[str, type]) -> None:
    if is_null(node):
        return
    if isinstance(node, Scalar) and kind.shorthand:
        node = Map({kind.shorthand: node}, node.place)
    if isinstance(node, Map):
        _read_keys(keys_of(kind.cls), node, path, reading, root)
    else:
        reading.bad.add(path)
        known = ", ".join(list(keys_of(kind.cls))[:3])
        message, hint = "a section is needed here", f"indent its keys below it: {known}, …"
        reading.found.append(WRONG_TYPE.found(path, plain(node), message, hint, node.place))


def _means_none(kind: Kind, node: Node) -> bool:
    """`lr.name: None` is the word none, not an empty value."""
    return isinstance(kind, Choice) and isinstance(node, Scalar) and node.text.lower() in kind.options


def _with_default_items(key: Key, node: Node, reading: Reading) -> Node:
    """`-o …split.0=900` on a config that does not write the list changes an item of the default."""
    if isinstance(key.kind, (Integers, Words)) and isinstance(node, Map) and is_items(node):
        return replace_items([Scalar(str(item), node.place) for item in key.default], node, reading.found)
    return node


def _suggestion(name: str, keys: Mapping[str, Key], root: Mapping[str, type]) -> str:
    """What may have been meant by a key that resembles none of its neighbours."""
    elsewhere = [known for known in _all_paths(root) if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"it belongs in {elsewhere[0].rpartition('.')[0]}"
    by_name = {known.rpartition(".")[2]: known for known in [*RENAMED, *_all_paths(root)]}
    if near := closest(name, by_name, likeness=0.85):
        return f"did you mean {by_name[near[0]]}?"
    known = list(keys)
    return f"known here: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"


def _all_paths(root: Mapping[str, type]) -> Iterator[str]:
    for name, cls in root.items():
        yield from paths_of(cls, name)


def paths_of(cls: type, path: str = "") -> Iterator[str]:
    """The key paths of all values below a section."""
    for name, key in keys_of(cls).items():
        full = f"{path}.{name}" if path else name
        if isinstance(key.kind, Section):
            yield from paths_of(key.kind.cls, full)
        else:
            yield full


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """The section object of complete values; what is missing has its default."""
    arguments: dict[str, Any] = {}
    for name, key in keys_of(cast("type", cls)).items():
        full = f"{path}.{name}" if path else name
        if isinstance(key.kind, Section):
            arguments[name] = build(key.kind.cls, values, full)
        elif full in values:
            arguments[name] = values[full]
    return cls(**arguments)
