"""Tensor parallel: the ranks of an mp group hold different heads, ffn columns and vocabulary rows of the same layers.

Shapes: B samples, T tokens, C hidden.
Parameters are plain tensors of a rank's own part, and the collectives are written out, as in Megatron-LM: an all-reduce
after every product that sums over a split dimension, and one in the backward pass of every product that reads what all
ranks share. With `sequence_parallel`, hidden states between them are split along T: each of these all-reduces becomes a
reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.dropout import own_stream
from trainer.loss import chunked_loss
from trainer.mesh import Mesh
from trainer.model import GPT, Block, Embedding, Head, Linear, SelfAttention

Action = Callable[[Tensor], Tensor]

# torch 2.13 renames them, and warns of the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The dimension along which a parameter is split; what is not named is the same on all ranks of a group.
SPLIT = {
    "qkv_proj.weight": 0,
    "qkv_proj.bias": 0,
    "out_proj.weight": 1,
    "linear1.weight": 0,
    "linear1.bias": 0,
    "linear2.weight": 1,
    "word_embeddings.weight": 0,
}


def split_dim(name: str) -> int | None:
    return SPLIT.get(".".join(name.split(".")[-2:]))


class Group:
    """The ranks of an mp group, and what they do together with hidden states (B, T or T / mp, C)."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        self.group, self.size, self.rank = mesh.groups["mp"], mesh.layout.mp, mesh.at.mp
        self.device, self.sequence_parallel = mesh.device, sequence_parallel

    def whole(self, x: Tensor) -> Tensor:
        """What all ranks are to read: the whole sequence."""
        actions = (
            (self.all_gather, self.reduce_scatter)
            if self.sequence_parallel
            else (_as_it_is, self.all_reduce)
        )
        result: Tensor = _Exchange.apply(x, *actions)
        return result

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks made: on all of them, or each with its part of the sequence."""
        actions = (
            (self.reduce_scatter, self.all_gather)
            if self.sequence_parallel
            else (self.all_reduce, _as_it_is)
        )
        result: Tensor = _Exchange.apply(x, *actions)
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _ALL_GATHER(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        own = parts.new_empty((x.shape[0], *parts.shape[1:]))
        _REDUCE_SCATTER(own, parts, group=self.group)
        return own


class _Exchange(torch.autograd.Function):
    """What happens to hidden states on the way forth, and to their gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Action, back: Action) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(outer[0]), None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)


class ColumnLinear(Linear):
    """Own columns of the result, from the whole input."""

    mp: Group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.mp.whole(x), self.weight, self.bias)


class RowLinear(Linear):
    """The whole result, from own columns of the input."""

    mp: Group

    def forward(self, x: Tensor) -> Tensor:
        return self.mp.sum(F.linear(x, self.weight)) + self.bias


class SplitAttention(SelfAttention):
    """Own heads; each rank drops other attention weights."""

    mp: Group

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not (self.dropout and self.training) or self.mp.sequence_parallel:
            return super()._core(q, k, v)
        with own_stream(self.mp.device, self.mp.rank):
            return super()._core(q, k, v)


class VocabEmbedding(Embedding):
    """Own rows of the vocabulary: other tokens are zero here, and come from the rank that has them."""

    mp: Group

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        own = tokens - self.mp.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.mp.sum(found.masked_fill(elsewhere[..., None], 0.0))


class PositionEmbedding(Embedding):
    mp: Group

    def forward(self, positions: Tensor) -> Tensor:
        if self.mp.sequence_parallel:
            positions = positions.chunk(self.mp.size)[self.mp.rank]
        return F.embedding(positions, self.weight)


class VocabHead(Head):
    """The loss from own rows of the vocabulary: no rank ever sees all logits of a token."""

    mp: Group

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None, factor: float) -> Tensor:
        assert labels is not None, "logits of the whole vocabulary are made by one process only"
        first_row = self.mp.rank * weight.shape[0]
        return chunked_loss(
            self.mp.whole(x), weight, labels, self.vocab_size, factor, first_row, self.mp.group
        )


def split(part: GPT, mesh: Mesh, sequence_parallel: bool) -> None:
    """Makes a model without memory one of this rank's share."""
    group = Group(mesh, sequence_parallel)
    for module in part.modules():
        if isinstance(module, Block):
            _become(module.self_attn, SplitAttention, group)
            for child in (module.self_attn.qkv_proj, module.linear1):
                _become(child, ColumnLinear, group)
            for child in (module.self_attn.out_proj, module.linear2):
                _become(child, RowLinear, group)
    if part.is_first or part.is_last:
        _become(part.word_embeddings, VocabEmbedding, group)
    if part.is_first:
        _become(part.position_embeddings, PositionEmbedding, group)
    if part.is_last:
        _become(part.head, VocabHead, group)
    for name, parameter in list(part.named_parameters()):
        if (dim := split_dim(name)) is not None:
            own = parameter.chunk(group.size, dim)[group.rank]
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner).register_parameter(last, nn.Parameter(torch.empty_like(own)))


def _become(module: nn.Module, cls: type[nn.Module], group: Group) -> None:
    """The same module in the same place under the same name, with another forward pass."""
    module.__class__ = cls
    module.mp = group  # type: ignore[assignment]
