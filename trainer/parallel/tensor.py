"""Tensor parallelism: the ranks of an mp group split the heads, ffn columns and vocabulary rows.

Shapes: B samples, T tokens, C hidden.
Parameters are plain tensors with a rank's own part, and the collectives are explicit, as in
Megatron-LM: an all-reduce after every product that sums over a split dimension, and one in the
backward pass of every product whose input is shared by all ranks. With `sequence_parallel`, the
hidden states in between are split along T: each all-reduce becomes a reduce-scatter and an
all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.dropout import own_stream
from trainer.loss import chunked_loss
from trainer.mesh import Mesh
from trainer.model import Components, Embedding, Head, Linear

Action = Callable[[Tensor], Tensor]

# torch 2.13 renames these functions, and warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The dimension along which a parameter is split. All other parameters are replicated in the group.
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
    """The ranks of an mp group, and their collectives on hidden states (B, T or T / mp, C)."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        self.group, self.size, self.rank = mesh.groups["mp"], mesh.layout.mp, mesh.at.mp
        self.device, self.sequence_parallel = mesh.device, sequence_parallel

    def whole(self, x: Tensor) -> Tensor:
        """The input of a column-parallel product: the whole sequence on every rank."""
        actions = (
            (self.all_gather, self.reduce_scatter)
            if self.sequence_parallel
            else (_identity, self.all_reduce)
        )
        result: Tensor = _Collective.apply(x, *actions)
        return result

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' results: all of it, or each rank's part of the sequence."""
        actions = (
            (self.reduce_scatter, self.all_gather)
            if self.sequence_parallel
            else (self.all_reduce, _identity)
        )
        result: Tensor = _Collective.apply(x, *actions)
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        # all_reduce works in place, but autograd may still need x.
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        # The collective concatenates along the first dimension; move the parts to dimension T.
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _ALL_GATHER(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        own = parts.new_empty((x.shape[0], *parts.shape[1:]))
        _REDUCE_SCATTER(own, parts, group=self.group)
        return own


class _Collective(torch.autograd.Function):
    """One action on hidden states in the forward pass, another on their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_action: Action, backward_action: Action) -> Tensor:
        ctx.backward_action = backward_action
        return forward_action(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_action(outer[0]), None, None


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # a view, because autograd treats a returned input specially


class ColumnLinear(Linear):
    """Computes this rank's columns of the output, from the whole input."""

    def __init__(self, inputs: int, outputs: int, mp: Group) -> None:
        super().__init__(inputs, outputs // mp.size)
        self.mp = mp

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.mp.whole(x), self.weight, self.bias)


class RowLinear(Linear):
    """Computes the whole output, from this rank's columns of the input."""

    def __init__(self, inputs: int, outputs: int, mp: Group) -> None:
        super().__init__(inputs // mp.size, outputs)
        self.mp = mp

    def forward(self, x: Tensor) -> Tensor:
        # The bias after the sum: otherwise every rank would add it once.
        return self.mp.sum(F.linear(x, self.weight)) + self.bias


class VocabEmbedding(Embedding):
    """Holds this rank's rows of the vocabulary. Other tokens are zero until the sum over ranks."""

    def __init__(self, vocab: int, hidden: int, mp: Group) -> None:
        super().__init__(vocab // mp.size, hidden)
        self.mp = mp

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        own = tokens - self.mp.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.mp.sum(found.masked_fill(elsewhere[..., None], 0.0))


class PartEmbedding(Embedding):
    """Position embeddings of this rank's part of the sequence."""

    def __init__(self, length: int, hidden: int, mp: Group) -> None:
        super().__init__(length, hidden)
        self.mp = mp

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.mp.size)[self.mp.rank], self.weight)


class VocabHead(Head):
    """Computes the loss from this rank's rows of the vocabulary: no rank sees all logits."""

    def __init__(self, vocab_size: int, mp: Group) -> None:
        super().__init__(vocab_size)
        self.mp = mp

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None, factor: float) -> Tensor:
        assert labels is not None, "with tensor parallelism, no rank has all logits"
        first_row = self.mp.rank * weight.shape[0]
        whole, vocab_size, group = self.mp.whole(x), self.vocab_size, self.mp.group
        return chunked_loss(whole, weight, labels, vocab_size, factor, self.sums, first_row, group)


class TensorComponents(Components):
    """The layers of one rank of an mp group: modules of this rank's size, with collectives."""

    def __init__(self, mp: Group) -> None:
        self.mp = mp

    def word_embeddings(self, vocab: int, hidden: int) -> Embedding:
        return VocabEmbedding(vocab, hidden, self.mp)

    def position_embeddings(self, length: int, hidden: int) -> Embedding:
        if self.mp.sequence_parallel:
            return PartEmbedding(length, hidden, self.mp)
        return super().position_embeddings(length, hidden)

    def qkv_proj(self, hidden: int) -> Linear:
        return ColumnLinear(hidden, 3 * hidden, self.mp)

    def out_proj(self, hidden: int) -> Linear:
        return RowLinear(hidden, hidden, self.mp)

    def linear1(self, hidden: int, ffn: int) -> Linear:
        return ColumnLinear(hidden, ffn, self.mp)

    def linear2(self, ffn: int, hidden: int) -> Linear:
        return RowLinear(ffn, hidden, self.mp)

    def head(self, vocab_size: int) -> Head:
        return VocabHead(vocab_size, self.mp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention of this rank's heads. Each rank draws its own attention dropout."""
        # With sequence parallelism, the ranks have different random streams already.
        if not dropout or self.mp.sequence_parallel:
            return super().attend(q, k, v, dropout)
        with own_stream(self.mp.device, self.mp.rank):
            return super().attend(q, k, v, dropout)
