"""From a tree to typed values: every key read by its kind, every unknown key reported with the nearest known one.

Values are flat, by key path (`Model.hidden_size`); a section object is built when all of them are complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from trainer.config.dialects import RENAMED, UNKNOWN, is_ignored
from trainer.config.kinds import (
    WRONG_TYPE,
    BadItems,
    BadValue,
    Choice,
    Integers,
    Key,
    Kind,
    Names,
    Section,
    Words,
    keys_of,
)
from trainer.config.layers import is_items, replace_items
from trainer.config.tree import TWICE, Map, Node, Scalar, is_null, plain
from trainer.errors import Finding, Place, closest

T = TypeVar("T")

MANY = 100  # findings after which looking for what was meant costs more than it helps

# What Megatron, DeepSpeed and torchtitan call these; accepted nowhere, since one thing has one word.
OTHER_WORDS = {
    **dict.fromkeys(
        ("tp", "tp_degree", "tp_size", "tensor_parallel_degree", "tensor_model_parallel_size"), "mp_degree"
    ),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_degree", "pipeline_model_parallel_size"), "pp_degree"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_degree", "data_parallel_size"), "dp_degree"),
    **dict.fromkeys(("fsdp", "zero_stage", "zero"), "sharding.sharding_stage"),
    **dict.fromkeys(("seq_length", "seq_len", "sequence_length"), "max_seq_len"),
    **dict.fromkeys(("lr", "learning_rate"), "Optimizer.lr.max_lr"),
}


class Reading:
    """What was read so far: values by key path, where they were written, and what was wrong."""

    def __init__(self, found: list[Finding], sections: Mapping[str, type]) -> None:
        self.found = found
        self.sections = sections
        self.values: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.emptied: set[str] = set()  # written, but with nothing behind the colon
        self.bad = {finding.key for finding in found if finding.code == TWICE.code}
        self.ignored: dict[str, Place] = {}  # keys that mean something to others only

    def refuse(self, path: str, node: Node, faults: Iterable[BadValue]) -> None:
        self.bad.add(path)
        for bad in faults:
            full = join(path, bad.key) if bad.key else path
            self.found.append(bad.rule.found(full, plain(node), bad.message, bad.hint, bad.place or node.place))

    def judge(self, findings: Iterable[Finding], unknown: Collection[str] = ()) -> list[Finding]:
        """Of what rules found, that which rests on readable keys, each at the place where it can be mended."""
        sound = [finding for finding in findings if not any(self._is_bad(key, unknown) for key in finding.uses)]
        return [finding.at(self._nearest_place((finding.key, *finding.uses))) for finding in sound]

    def is_bad(self, path: str) -> bool:
        return self._is_bad(path, ())

    def _is_bad(self, path: str, unknown: Collection[str]) -> bool:
        if path in unknown:
            return True
        return any(bad == path or bad.startswith(path + ".") or path.startswith(bad + ".") for bad in self.bad)

    def _nearest_place(self, paths: Iterable[str]) -> Place | None:
        """Of these keys the first that is written, else the first whose section is."""
        while paths := [path for path in paths if path]:
            for path in paths:
                if path in self.places:
                    return self.places[path]
            paths = [path.rpartition(".")[0] for path in paths]
        return None


def read_root(tree: Map, reading: Reading, unread: tuple[str, ...] = ()) -> None:
    """Reads the sections of a whole config; `unread` sections belong to another program."""
    keys = {name: Key(Section(cls), None, "") for name, cls in reading.sections.items()}
    _read_keys(
        keys, Map({name: node for name, node in tree.items.items() if name not in unread}, tree.place), "", reading
    )


def read_section(cls: type, node: Map, found: list[Finding]) -> Reading:
    """Reads a document that is one section, such as a cluster profile."""
    reading = Reading(found, {"": cls})
    _read_keys(keys_of(cls), node, "", reading)
    return reading


def _read_keys(keys: Mapping[str, Key], node: Map, path: str, reading: Reading) -> None:
    for name, child in node.items.items():
        child_path = join(path, name)
        if name in keys:
            reading.places[child_path] = child.place
            _read_key(keys[name], child, child_path, reading)
        elif ignored := _ignored(child_path, child):
            reading.ignored.update(ignored)
        else:
            near = closest(name, keys) if len(reading.found) < MANY and name not in OTHER_WORDS else []
            # A rule must not judge the default of a key that was written, only misspelt.
            reading.bad |= {child_path, *(join(path, other) for other in near)}
            hint = f"did you mean {near[0]}?" if near else _suggestion(name, keys, reading)
            where = f"{path} has no key {name}" if path else f"there is no section or key {name}"
            reading.found.append(UNKNOWN.found(child_path, plain(child), where, hint, child.place))


def _ignored(path: str, node: Node) -> dict[str, Place]:
    """The key, or the keys of a foreign group, when all of it may be left aside."""
    if is_ignored(path):
        return {path: node.place}
    inner = {join(path, name): child.place for name, child in node.items.items()} if isinstance(node, Map) else {}
    return inner if all(is_ignored(name) for name in inner) else {}


def _read_key(key: Key, node: Node, path: str, reading: Reading) -> None:
    kind = key.kind
    if isinstance(kind, Section):
        _read_nested(kind, node, path, reading)
    elif is_null(node) and not _means_none(kind, node):
        reading.emptied.add(path)
    else:
        if isinstance(kind, Names) and isinstance(node, Map):
            reading.places.update({f"{path}.{name}": item.place for name, item in node.items.items()})
        try:
            reading.values[path] = kind.read(_with_default_items(key, node, path, reading))
        except BadItems as bad:
            reading.values[path] = bad.rest  # the lint of an environment goes on with the variables that are right
            reading.refuse(path, node, bad.faults)
        except BadValue as bad:
            reading.refuse(path, node, [bad])


def _read_nested(kind: Section, node: Node, path: str, reading: Reading) -> None:
    if is_null(node):
        return
    if isinstance(node, Map):
        _read_keys(keys_of(kind.cls), node, path, reading)
    else:
        reading.bad.add(path)
        known = ", ".join(list(keys_of(kind.cls))[:3])
        message, hint = "a section is needed here", f"indent its keys below it: {known}, …"
        reading.found.append(WRONG_TYPE.found(path, plain(node), message, hint, node.place))


def _means_none(kind: Kind, node: Node) -> bool:
    """`lr.name: None` is the word none, not an empty value."""
    return isinstance(kind, Choice) and isinstance(node, Scalar) and node.text.lower() in kind.options


def _with_default_items(key: Key, node: Node, path: str, reading: Reading) -> Node:
    """`-o …split.0=900` on a config that does not write the list changes an item of the default, or of Train's list."""
    if isinstance(key.kind, (Integers, Words)) and isinstance(node, Map) and is_items(node):
        as_train = path.replace("Data.Eval.", "Data.Train.").replace("Data.Test.", "Data.Train.")
        items = reading.values.get(as_train, key.default)
        return replace_items([Scalar(str(item), node.place) for item in items], node, reading.found)
    return node


def _suggestion(name: str, keys: Mapping[str, Key], reading: Reading) -> str:
    """What may have been meant by a key that resembles none of its neighbours."""
    if len(reading.found) >= MANY:
        return "is this a run config?"
    if name in OTHER_WORDS:
        return f"it is called {OTHER_WORDS[name]} here"
    paths = [path for section, cls in reading.sections.items() for path in paths_of(cls, section)]
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"it belongs in {elsewhere[0].rpartition('.')[0]}"
    by_name = {path.rpartition(".")[2]: path for path in [*RENAMED, *paths]}
    if near := closest(name, by_name, likeness=0.85):
        return f"did you mean {by_name[near[0]]}?"
    known = list(keys)
    return f"known here: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def paths_of(cls: type, path: str = "") -> Iterator[str]:
    """The key paths of all values below a section."""
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            yield from paths_of(key.kind.cls, join(path, name))
        else:
            yield join(path, name)


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """The section object of complete values; what is missing has its default."""
    arguments: dict[str, Any] = {}
    for name, key in keys_of(cast("type", cls)).items():
        full = join(path, name)
        if isinstance(key.kind, Section):
            arguments[name] = build(key.kind.cls, values, full)
        elif full in values:
            arguments[name] = values[full]
    return cls(**arguments)
