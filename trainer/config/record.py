"""Frozen dataclasses that are cheap to define.

`dataclass` compiles six methods for every class. A start of gptctl defines thirty sections, and compiling cost it more
CPU time than reading and checking a config; so comparison and repr are written once here and shared by them all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool):
        """As `@dataclass(frozen=True)`."""

        def decorate(cls: type) -> type:
            cls.__eq__, cls.__hash__, cls.__repr__ = _equal, None, _repr
            return dataclass(frozen=frozen, eq=False, repr=False)(cls)

        return decorate


def _values(self: Any) -> dict[str, Any]:
    return {item.name: getattr(self, item.name) for item in fields(self)}


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in _values(self).items())})"
