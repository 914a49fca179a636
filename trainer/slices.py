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


class Holders(NamedTuple):
    """How many ranks hold the same part, and the number of this rank among them."""

    total: int = 1
    number: int = 0


class Piece(NamedTuple):
    """A part of a tensor on this rank."""

    tensor: Tensor
    at: Slice
    holders: Holders = Holders()
    is_copy: bool = False  # another rank saves it


def whole(tensors: dict[str, Tensor]) -> dict[str, Piece]:
    return {name: Piece(tensor, Slice.of(tensor.shape)) for name, tensor in tensors.items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
