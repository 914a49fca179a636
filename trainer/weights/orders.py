"""The order of numbers in a weight here, and in other programs.

Shapes: C hidden, H heads, D = C / H. Our query, key and value have rows in the order (H, 3, D), and
a matrix has a row for each of its outputs. Every function makes at most one copy.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Converter = Callable[[Tensor, int], Tensor]  # of a tensor, and the number of heads

QKV_WEIGHT, QKV_BIAS = "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias"
MATRICES = (QKV_WEIGHT, "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")


def same(tensor: Tensor, heads: int) -> Tensor:
    return tensor


def transposed(tensor: Tensor, heads: int) -> Tensor:
    return tensor.t().contiguous()


def from_kind_first(tensor: Tensor, heads: int) -> Tensor:
    """Rows (3, H, D): all queries first, then all keys, then all values."""
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).reshape(tensor.shape)


def from_kind_first_columns(tensor: Tensor, heads: int) -> Tensor:
    return from_kind_first(tensor.t(), heads)


def from_kind_last(tensor: Tensor, heads: int) -> Tensor:
    """Rows (H, D, 3)."""
    return tensor.unflatten(0, (heads, -1, 3)).transpose(1, 2).reshape(tensor.shape)


def to_kind_first(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(tensor.shape)


def to_kind_first_columns(tensor: Tensor, heads: int) -> Tensor:
    rows, columns = tensor.shape
    return tensor.unflatten(0, (heads, 3, -1)).permute(3, 1, 0, 2).reshape(columns, rows)


def to_hugging_face(name: str) -> Converter:
    """How to convert a parameter of ours: GPT-2 there has Conv1D layers, with a row per input."""
    if name.endswith(QKV_WEIGHT):
        return to_kind_first_columns
    if name.endswith(QKV_BIAS):
        return to_kind_first
    return transposed if name.endswith(MATRICES) else same
