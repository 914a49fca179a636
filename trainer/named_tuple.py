"""`typing.NamedTuple` that is cheap to define.

typing compiles the annotation of every field. A short command of gptctl defines ninety of these
classes, and half of that time was for annotations that nobody reads: 4 ms of 95. Use it in modules
that most commands import.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

__all__ = ["NamedTuple"]

if TYPE_CHECKING:
    from typing import NamedTuple
else:

    class _Definition(type):
        """Makes a named tuple of the annotations of a class, with its defaults and methods."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body.pop("__annotations__", {})
            defaults = {field: body.pop(field) for field in fields if field in body}
            if list(defaults) != list(fields)[len(fields) - len(defaults) :]:
                raise TypeError(f"{name}: a field without a default follows one with a default")
            module = body.pop("__module__")
            made = namedtuple(name, fields, defaults=[*defaults.values()], module=module)
            # Strings, which `typing.get_type_hints` reads when it is asked.
            made.__annotations__ = fields
            for attribute, value in body.items():
                setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_Definition):
        """Like `typing.NamedTuple`, for classes without `super()` and without a second base."""
