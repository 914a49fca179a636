"""Make a NamedTuple of the values in a JSON file, if they have the types of its annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from gptctl.engine.file_reading import DamagedFile

T = TypeVar("T")  # a NamedTuple


def typed(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the record that these values make; raise DamagedFile if they do not fit.

    Values that the class does not know are ignored: a newer gptctl added them. Values that have a
    default may be missing: an older gptctl did not know them.
    """
    kinds = _kinds(cls)  # type: ignore[arg-type]
    known = {name: _as_tuple(values[name]) for name in kinds if name in values}
    defaults: Mapping[str, Any] = cls._field_defaults  # type: ignore[attr-defined]
    missing = [name for name in kinds if name not in known and name not in defaults]
    if missing:
        raise DamagedFile(f"{missing[0]} is missing")
    check_fields(known, kinds)
    return cls(**known)


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise DamagedFile if a value does not have the type that is given for its name."""
    for name, kind in kinds.items():
        if name in values and not fits(values[name], kind):
            raise DamagedFile(f"{name} is invalid")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of a JSON file has this type; lists count as tuples."""
    if kind is Any:
        return True
    of, inner = typing.get_origin(kind), typing.get_args(kind)
    if of in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if of is tuple:  # tuple[str, ...]
        is_list = isinstance(value, (tuple, list))
        return is_list and all(fits(item, inner[0]) for item in value)
    if of is Mapping:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    # bool is a subclass of int, but `true` is not a number of nodes.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


@cache
def _kinds(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
