"""Reads typed values from a tree, and reports unknown keys with the most similar known one.

Values are stored by key path (`Model.hidden_size`). `build` makes section objects of them once all
values are complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
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

MANY = 100  # findings after which searching for similar keys costs more than it helps

# Names in Megatron, DeepSpeed and torchtitan. Not accepted, so that each key has only one name, but
# suggested in the hint.
OTHER_WORDS = {
    **dict.fromkeys(
        ("tp", "tp_degree", "tp_size", "tensor_parallel_degree", "tensor_model_parallel_size"),
        "mp_degree",
    ),
    **dict.fromkeys(
        ("pp", "pp_size", "pipeline_parallel_degree", "pipeline_model_parallel_size"), "pp_degree"
    ),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_degree", "data_parallel_size"), "dp_degree"),
    **dict.fromkeys(("fsdp", "zero_stage", "zero"), "sharding.sharding_stage"),
    **dict.fromkeys(("seq_length", "seq_len", "sequence_length"), "max_seq_len"),
    **dict.fromkeys(("lr", "learning_rate"), "Optimizer.lr.max_lr"),
}


class Reading:
    """What was read so far: values by key path, where they were written, and all findings."""

    def __init__(self, found: list[Finding], sections: Mapping[str, type]) -> None:
        self.found = found
        self.sections = sections
        self.values: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.emptied: set[str] = set()  # written without a value
        self.bad = {path for finding in found for path in _doubtful(finding)}
        self.ignored: dict[str, Place] = {}  # keys that only other programs use
        self.is_other_task = False  # refused as a whole: see tasks.py

    def refuse(self, path: str, node: Node, kind: Kind, faults: Iterable[BadValue]) -> None:
        self.bad.add(path)
        for bad in faults:
            item = bad.item or node
            # Findings are printed and logged, so they must not contain secrets.
            value = None if getattr(kind, "is_secret", False) else plain(item)
            full = join(path, bad.key) if bad.key else path
            hint = bad.hint.replace("-o KEY=", f"-o {full}=")
            self.found.append(bad.rule.found(full, value, bad.message, hint, item.place))

    def valid_findings(
        self, findings: Iterable[Finding], unknown: Collection[str] = ()
    ) -> list[Finding]:
        """The findings that depend only on valid keys, each with the place where to fix it."""
        sound = [
            finding
            for finding in findings
            if not any(self._is_bad(key, unknown) for key in finding.uses)
        ]
        return [finding.at(self._nearest_place((finding.key, *finding.uses))) for finding in sound]

    def is_bad(self, path: str) -> bool:
        return self._is_bad(path, ())

    def _is_bad(self, path: str, unknown: Collection[str]) -> bool:
        if path in unknown:
            return True
        # A bad key makes its section and its items bad as well.
        return any(
            bad == path or bad.startswith(path + ".") or path.startswith(bad + ".")
            for bad in self.bad
        )

    def _nearest_place(self, paths: Iterable[str]) -> Place | None:
        """The place of the first of these keys that is written, else of its nearest section."""
        while paths := [path for path in paths if path]:
            for path in paths:
                if path in self.places:
                    return self.places[path]
            paths = [path.rpartition(".")[0] for path in paths]
        return None


def read_root(tree: Map, reading: Reading, unread: tuple[str, ...] = ()) -> None:
    """Read the sections of a whole config, except `unread` ones, which other programs read."""
    keys = {name: Key(Section(cls), None, "") for name, cls in reading.sections.items()}
    _read_keys(
        keys,
        Map({name: node for name, node in tree.items.items() if name not in unread}, tree.place),
        "",
        reading,
    )


def read_section(cls: type, node: Map, found: list[Finding]) -> Reading:
    """Read a document that consists of one section, such as a cluster profile."""
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
            meant, hint = _suggestion(name, child, path, keys, reading)
            # If a key is misspelt, rules must not complain about the default of the key that was
            # meant.
            reading.bad |= {child_path, *([meant] if meant else [])}
            what = f"{path} has no key {name}" if path else f"unknown section or key {name}"
            reading.found.append(UNKNOWN.found(child_path, plain(child), what, hint, child.place))


def _ignored(path: str, node: Node) -> dict[str, Place]:
    """The key, or all keys of a foreign group, if the trainer can ignore them; else nothing."""
    if is_ignored(path):
        return {path: node.place}
    inner = (
        {join(path, name): child.place for name, child in node.items.items()}
        if isinstance(node, Map)
        else {}
    )
    return inner if all(is_ignored(name) for name in inner) else {}


def _read_key(key: Key, node: Node, path: str, reading: Reading) -> None:
    kind = key.kind
    if isinstance(kind, Section):
        _read_nested(kind, node, path, reading)
    elif is_null(node) and not _means_none(kind, node):
        reading.emptied.add(path)
    else:
        if isinstance(kind, Names) and isinstance(node, Map):
            reading.places.update(
                {f"{path}.{name}": item.place for name, item in node.items.items()}
            )
        try:
            reading.values[path] = kind.read(_with_default_items(key, node, path, reading))
        except BadItems as bad:
            # Keep the valid items: later checks, such as those of `env`, can still use them.
            reading.values[path] = bad.rest
            reading.refuse(path, node, kind, bad.faults)
        except BadValue as bad:
            reading.refuse(path, node, kind, [bad])


def _read_nested(kind: Section, node: Node, path: str, reading: Reading) -> None:
    if is_null(node):
        return
    if isinstance(node, Map):
        _read_keys(keys_of(kind.cls), node, path, reading)
    else:
        reading.bad.add(path)
        known = ", ".join(list(keys_of(kind.cls))[:3])
        message, hint = "expected a section", f"write its keys indented below it: {known}, …"
        reading.found.append(WRONG_TYPE.found(path, plain(node), message, hint, node.place))


def _means_none(kind: Kind, node: Node) -> bool:
    """`Optimizer.lr.name: None` is the choice `none`, not an empty value."""
    return (
        isinstance(kind, Choice) and isinstance(node, Scalar) and node.text.lower() in kind.options
    )


def _with_default_items(key: Key, node: Node, path: str, reading: Reading) -> Node:
    """Apply `-o …split.0=900` to the default list, or to Train's, if the config writes none."""
    if isinstance(key.kind, (Integers, Words)) and isinstance(node, Map) and is_items(node):
        as_train = path.replace("Data.Eval.", "Data.Train.").replace("Data.Test.", "Data.Train.")
        items = reading.values.get(as_train, key.default)
        return replace_items(
            [Scalar(str(item), node.place) for item in items], node, reading.found, path
        )
    return node


def _suggestion(
    name: str, node: Node, path: str, keys: Mapping[str, Key], reading: Reading
) -> tuple[str, str]:
    """The key that was probably meant, if any, and a hint."""
    if len(reading.found) >= MANY:
        # A cluster profile has no sections.
        what = "the right file" if "" in reading.sections else "a run config"
        return "", f"check that this is {what}"
    paths = [path for section, cls in reading.sections.items() for path in _paths(cls, section)]
    # From the most to the least certain guess.
    if name in OTHER_WORDS and isinstance(node, Scalar):
        word = OTHER_WORDS[name]
        meant = next((known for known in paths if known.endswith(word)), "")
        return meant, f"use {word}"
    if elsewhere := _elsewhere(name, paths):  # in the wrong place, but not misspelt
        return elsewhere, f"move it to {elsewhere.rpartition('.')[0]}"
    # The old names of a section are names of its own, except in a cluster profile.
    old = [known for known in RENAMED if known.rpartition(".")[0] == path and path]
    if near := closest(name, [*keys, *(known.rpartition(".")[2] for known in old)]):
        known = join(path, near[0])
        return RENAMED.get(known, (known,))[0], f"did you mean {near[0]}?"
    if not path and "" not in reading.sections:
        return _suggestion_at_root(name, keys, paths)
    return "", _known(keys)


def _suggestion_at_root(name: str, keys: Iterable[str], paths: Iterable[str]) -> tuple[str, str]:
    """At the root any key is possible, as a flag or with its path, but it must be very similar."""
    flags = [known for known in RENAMED if "." not in known]
    by_name = {known.rpartition(".")[2]: known for known in [*flags, *paths]}
    by_name.pop(name, None)
    if near := closest(name, by_name, likeness=0.85):
        known = by_name[near[0]]
        return RENAMED.get(known, (known,))[0], f"did you mean {known}?"
    return "", _known(keys)


def _known(keys: Iterable[str]) -> str:
    names = list(keys)
    return f"known here: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"


def _elsewhere(name: str, paths: Iterable[str]) -> str:
    """The one key of this name in another section. Eval and Test have the keys of Train."""
    found = [known for known in paths if known.rpartition(".")[2] == name]
    found = [known for known in found if not known.startswith(("Data.Eval.", "Data.Test."))]
    return found[0] if 1 <= len(found) <= 2 else ""


def _doubtful(finding: Finding) -> Iterable[str]:
    """The keys whose value is unreliable after a finding of an earlier step."""
    key = finding.key.removeprefix("PreTraining.")
    return (
        (key, *RENAMED.get(key, ()), *finding.uses)
        if finding.code in (TWICE.code, UNKNOWN.code)
        else ()
    )


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def paths_of(cls: type, path: str = "") -> Iterator[str]:
    """The key paths of all values below a section."""
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            yield from paths_of(key.kind.cls, join(path, name))
        else:
            yield join(path, name)


@cache
def _paths(cls: type, path: str) -> tuple[str, ...]:
    return tuple(paths_of(cls, path))


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a section object; missing values get their default."""
    arguments: dict[str, Any] = {}
    for name, key in keys_of(cast("type", cls)).items():
        full = join(path, name)
        if isinstance(key.kind, Section):
            arguments[name] = build(key.kind.cls, values, full)
        elif full in values:
            arguments[name] = values[full]
    return cls(**arguments)
