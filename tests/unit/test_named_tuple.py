"""`trainer.named_tuple` against `typing.NamedTuple`, for what the project uses of it."""

from __future__ import annotations

import pickle
import typing

import pytest

from trainer.named_tuple import NamedTuple


class Cheap(NamedTuple):
    """A point."""

    x: int
    y: int | None = None

    @property
    def length(self) -> int:
        return self.x + (self.y or 0)

    def __str__(self) -> str:
        return f"({self.x}, {self.y})"


class Original(typing.NamedTuple):
    """A point."""

    x: int
    y: int | None = None


def test_a_cheap_named_tuple_is_like_one_of_typing() -> None:
    """Oracle: typing."""
    for name in ("_fields", "_field_defaults", "__doc__", "__module__", "__bases__"):
        assert getattr(Cheap, name) == getattr(Original, name), name
    assert typing.get_type_hints(Cheap) == typing.get_type_hints(Original)
    point = Cheap(1, y=2)
    assert (repr(point), str(point), point.length) == ("Cheap(x=1, y=2)", "(1, 2)", 3)
    assert point == Original(1, 2)
    assert point._replace(y=None)._asdict() == {"x": 1, "y": None}
    assert pickle.loads(pickle.dumps(point)) == point
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Cheap()
    with pytest.raises(AttributeError):
        point.x = 3
    with pytest.raises(TypeError, match="without a default"):

        class Wrong(NamedTuple):
            x: int = 0
            y: int  # type: ignore[misc]
