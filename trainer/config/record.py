"""Frozen dataclasses that are cheap to define.

`dataclass` compiles six methods for every class. gptctl defines thirty sections at start-up, and
compiling took more CPU time than reading and checking a config. So all sections share the methods
below. `fields`, `asdict` and `replace` work as usual.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool):
        """Like `@dataclass(frozen=True)`, for classes without a base class."""
        assert frozen

        def decorate(cls: type) -> type:
            # Without a docstring, dataclass generates one from the signature, which is slow.
            cls.__doc__ = cls.__doc__ or cls.__name__
            cls = dataclass(init=False, eq=False, repr=False)(cls)
            # Not hashable, because sections may contain dictionaries.
            cls.__init__, cls.__eq__, cls.__hash__, cls.__repr__ = _init, _equal, None, _repr
            cls.__setattr__ = cls.__delattr__ = _refuse
            return cls

        return decorate


def _init(self: Any, **values: Any) -> None:
    for item in fields(self):
        if item.name in values:
            value = values.pop(item.name)
        elif item.default_factory is not MISSING:
            value = item.default_factory()
        else:
            value = item.default
        if value is MISSING:
            raise TypeError(f"{type(self).__name__} needs {item.name}")
        object.__setattr__(self, item.name, value)  # past `_refuse`
    if values:
        raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed")


def _values(self: Any) -> dict[str, Any]:
    return {item.name: getattr(self, item.name) for item in fields(self)}


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
    return f"{type(self).__name__}({values})"
