"""Which part of a tensor a rank holds, in the coordinates of the whole, and who else holds the same."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Slice(NamedTuple):
    """A box inside a tensor of the shape `whole`."""

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
        """One of several parts, cut as torch.chunk does: the last ones may be shorter, or empty."""
        length = -(-self.sizes[dim] // parts)
        begin = min(index * length, self.sizes[dim])
        size = min(length, self.sizes[dim] - begin)
        return self._replace(
            offsets=(*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :]),
            sizes=(*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )


class Holders(NamedTuple):
    """The ranks that hold the same part, and which of them this one is."""

    total: int = 1
    number: int = 0


class Piece(NamedTuple):
    """A part of a tensor, on this rank."""

    tensor: Tensor
    at: Slice
    holders: Holders = Holders()
    is_copy: bool = False  # of what another rank saves


def whole(tensors: dict[str, Tensor]) -> dict[str, Piece]:
    return {name: Piece(tensor, Slice.of(tensor.shape)) for name, tensor in tensors.items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
