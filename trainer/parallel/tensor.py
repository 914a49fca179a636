"""Tensor parallelism: the ranks of an mp group split the heads, ffn columns and vocabulary rows.

Shapes: B samples, T tokens, C hidden.
Parameters are plain tensors with a rank's own part, and the collectives are explicit, as in
Megatron-LM: an all-reduce after every product that sums over a split dimension, and one in the
backward pass of every product whose input is shared by all ranks. With `sequence_parallel`, the
hidden states in between are split along T: each all-reduce becomes a reduce-scatter and an
all-gather. In half precision, messages are half precision too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.dropout import own_stream
from trainer.loss import Exchange, Factor, chunked_loss
from trainer.mesh import Mesh, wait_for
from trainer.model import Compiler, Components, Embedding, Head, Linear
from trainer.parallel.axis_collectives import AxisCollectives

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
    """The ranks of an mp group, and their collectives on hidden states.

    With `sequence_parallel`, hidden states between products are (B, T / mp, C), and those of the
    whole sequence are (mp · B, T / mp, C): ordered by parts, because collectives work along the
    first dimension. Only attention needs whole samples; everything else treats tokens alike.
    """

    def __init__(
        self, mesh: Mesh, sequence_parallel: bool, compiler: Compiler | None = None
    ) -> None:
        self.compiler = compiler or Compiler()
        self.column_product = self.compiler.eager(_ColumnProduct.apply)
        self.parts_product = self.compiler.eager(_PartsProduct.apply)
        self.total = self.compiler.eager(_Sum.apply)
        self.group, self.size, self.rank = mesh.groups["mp"], mesh.layout.mp, mesh.at.mp
        self.collectives = AxisCollectives.along("mp", mesh)
        self.device, self.sequence_parallel = mesh.device, sequence_parallel

    def whole(self, x: Tensor) -> Exchange:
        """The whole sequence, from each rank's part of it."""
        if not self.sequence_parallel:
            return Exchange(x)
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return Exchange(parts, self.collectives.gather(parts, x.contiguous()))

    def sum(self, x: Tensor) -> Exchange:
        """The sum of all ranks' results, or each rank's part of it. Overwrites `x`."""
        x = x.contiguous()
        if not self.sequence_parallel:
            return Exchange(x, self.collectives.sum(x))
        own = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return Exchange(own, self.collectives.reduce_scatter(own, x))

    def by_parts(self, x: Tensor) -> Tensor:
        """(B, T, …) -> (mp · B, T / mp, …), with sequence parallelism."""
        if not self.sequence_parallel:
            return x
        return x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def by_samples(self, x: Tensor) -> Tensor:
        """(mp · B, T / mp, …) -> (B, T, …), with sequence parallelism."""
        if not self.sequence_parallel:
            return x
        return x.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)


class _ColumnProduct(torch.autograd.Function):
    """Gather the input, then multiply.

    Keeps only this rank's part of the input for the backward pass, and gathers it again there. The
    exchanges of the backward pass run during its two products. Weights are converted to the dtype
    of the input in both passes, so that no copies of them are kept in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mp: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mp = mp
        return F.linear(mp.whole(x).result(), weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, outer
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        gathering = ctx.mp.whole(x) if wants_weight else None
        sum_of_dx = ctx.mp.sum(dy @ weight.to(dy.dtype)) if wants_x else None
        dw = _weight_gradient(dy, gathering.result(), weight) if gathering else None
        db = dy.sum((0, 1), dtype=weight.dtype) if wants_bias else None
        return sum_of_dx.result() if sum_of_dx else None, dw, db, None


class _PartsProduct(torch.autograd.Function):
    """The product of an input that is ordered by samples, with a result that is ordered by parts.

    The input is reordered again in the backward pass: only attention's own result is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mp: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mp = mp
        return F.linear(mp.by_parts(x), weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,), mp = ctx.saved_tensors, outer, ctx.mp
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = mp.by_samples(dy @ weight.to(dy.dtype)) if wants_x else None
        dw = _weight_gradient(dy, mp.by_parts(x), weight) if wants_weight else None
        return dx, dw, None


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (dy.flatten(0, 1).T @ x.flatten(0, 1)).to(weight.dtype)


class _Sum(torch.autograd.Function):
    """The sum over the ranks of hidden states that nothing else uses, in place if possible."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mp: Group) -> Tensor:
        ctx.mp, total = mp, mp.sum(x).result()
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return ctx.mp.whole(outer[0]).result(), None


def _autocast(x: Tensor) -> Tensor:
    """Convert to the dtype of autocast *before* an exchange, which then has half the bytes."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


class ColumnLinear(Linear):
    """Computes this rank's columns of the output, from the whole input."""

    def __init__(self, inputs: int, outputs: int, mp: Group, by_samples: bool = False) -> None:
        super().__init__(inputs, outputs // mp.size)
        self.mp, self.by_samples = mp, by_samples

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mp.column_product(_autocast(x), self.weight, self.bias, self.mp)
        return self.mp.by_samples(y) if self.by_samples else y


class RowLinear(Linear):
    """Computes the whole output, from this rank's columns of the input."""

    def __init__(self, inputs: int, outputs: int, mp: Group, by_samples: bool = False) -> None:
        super().__init__(inputs // mp.size, outputs)
        self.mp, self.by_samples = mp, by_samples

    def forward(self, x: Tensor) -> Tensor:
        if self.by_samples and self.mp.sequence_parallel:
            y = self.mp.parts_product(_autocast(x), self.weight, self.mp)
        else:
            y = F.linear(x, self.weight)
        # Not in one function with the product: recomputation then stops before the last sum of a
        # layer. The bias after the sum, or every rank would add it once.
        total: Tensor = self.mp.total(y, self.mp)
        return total + self.bias.to(total.dtype)


class VocabEmbedding(Embedding):
    """Holds this rank's rows of the vocabulary. Other tokens are zero until the sum over ranks."""

    def __init__(self, vocab: int, hidden: int, mp: Group) -> None:
        super().__init__(vocab // mp.size, hidden)
        self.mp = mp

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        own = self.mp.by_parts(tokens) - self.mp.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        found.masked_fill_(elsewhere[..., None], 0.0)
        total: Tensor = self.mp.total(_autocast(found), self.mp)
        return total


class PartEmbedding(Embedding):
    """Position embeddings of this rank's part of the sequence."""

    def __init__(self, length: int, hidden: int, mp: Group) -> None:
        super().__init__(length, hidden)
        self.mp = mp

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.mp.size)[self.mp.rank], self.weight)


class VocabHead(Head):
    """Computes the loss from this rank's rows of the vocabulary: no rank sees all logits.

    Without labels, all ranks get all logits: to generate text, which needs few of them.
    """

    mp: Group

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        own = F.linear(x, weight)
        parts = own.new_empty((self.mp.size * own.shape[0], *own.shape[1:]))
        wait_for(self.mp.collectives.gather(parts, own.contiguous()))
        return parts.unflatten(0, (self.mp.size, -1)).movedim(0, -2).flatten(-2)

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None, factor: Factor) -> Tensor:
        if labels is None:
            return self.logits(x, weight)
        x, labels = _autocast(x), self.mp.by_parts(labels)
        return chunked_loss(x, weight, labels, self.vocab_size, factor, self.sums, self.mp)


class TensorComponents(Components):
    """The layers of one rank of an mp group: modules of this rank's size, with collectives."""

    def __init__(self, mp: Group) -> None:
        super().__init__(mp.compiler)
        self.mp = mp
        self.attend_alone = mp.compiler.eager(self._attend_alone)

    def word_embeddings(self, vocab: int, hidden: int) -> Embedding:
        return VocabEmbedding(vocab, hidden, self.mp)

    def position_embeddings(self, length: int, hidden: int) -> Embedding:
        if self.mp.sequence_parallel:
            return PartEmbedding(length, hidden, self.mp)
        return super().position_embeddings(length, hidden)

    def qkv_proj(self, hidden: int) -> Linear:
        return ColumnLinear(hidden, 3 * hidden, self.mp, by_samples=True)

    def out_proj(self, hidden: int) -> Linear:
        return RowLinear(hidden, hidden, self.mp, by_samples=True)

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
        result: Tensor = self.attend_alone(q, k, v, dropout)
        return result

    def _attend_alone(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        with own_stream(self.mp.device, self.mp.rank):
            return super().attend(q, k, v, dropout)
