"""Describes which part of a tensor a rank holds, and which other ranks hold the same part."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Slice(NamedTuple):
    """A rectangular part of a tensor with the shape `whole`."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Slice:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def row_numel(self) -> int:
        """Elements per row, where a scalar is one row."""
        return math.prod(self.sizes[1:])

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def chunk(self, dim: int, parts: int, index: int) -> Slice:
        """One of several parts along a dimension.

        Split like torch.chunk and FSDP: the last parts may be shorter, or empty.
        """
        length = -(-self.sizes[dim] // parts)  # rounded up
        begin = min(index * length, self.sizes[dim])
        size = min(length, self.sizes[dim] - begin)
        return self._replace(
            offsets=(*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :]),
            sizes=(*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )

    def rows(self, begin: int, end: int) -> Slice:
        """Some of its rows, counted from its own first one."""
        offsets = (self.offsets[0] + begin, *self.offsets[1:])
        return self._replace(offsets=offsets, sizes=(end - begin, *self.sizes[1:]))

    def overlap(self, other: Slice) -> Slice | None:
        """What both contain, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes)
        )
        sizes = tuple(end - begin for begin, end in zip(begins, ends))
        return Slice(self.whole, begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """The index of this part in a tensor that holds `outer`."""
        return tuple(
            slice(begin - first, begin - first + size)
            for begin, first, size in zip(self.offsets, outer.offsets, self.sizes)
        )


class Holders(NamedTuple):
    """How many ranks hold the same part, and the number of this rank among them."""

    total: int = 1
    number: int = 0


class Piece(NamedTuple):
    """A part of a tensor on this rank."""

    tensor: Tensor
    at: Slice
    holders: Holders = Holders()
    is_copy: bool = False  # another pipeline stage holds the original

    def rows(self, begin: int, end: int) -> Piece:
        """Some of its rows. A scalar has one."""
        if not self.at.whole:
            return self
        return self._replace(tensor=self.tensor[begin:end], at=self.at.rows(begin, end))


def whole(tensors: dict[str, Tensor]) -> dict[str, Piece]:
    return {name: Piece(tensor, Slice.of(tensor.shape)) for name, tensor in tensors.items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
