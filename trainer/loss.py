"""Next-token cross entropy from hidden states and embedding, without storing all logits.

Shapes: N tokens, C hidden, V rows of the padded vocabulary that this rank holds.
With a vocabulary of 50,304, the logits of a micro-batch and their gradient are the largest tensors
of a GPT. Here they exist only for one chunk of tokens at a time: the gradient of the inputs is
computed before the next chunk.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.device import behaviour
from trainer.logit_chunks import LARGE_VOCAB, chunk_length
from trainer.mesh import Work, wait_for

IGNORED = -100  # label of tokens that are not predicted; torch's own default


class OnDevice:
    """A factor that only the device knows, because it contains the loss scale of float16.

    Not just a tensor: among the arguments of a module, FSDP casts tensors to half precision, and
    torch's pipeline schedules split them into micro-batches.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value


Factor = float | OnDevice


def multiplier(factor: Factor) -> float | Tensor:
    return factor.value if isinstance(factor, OnDevice) else factor


class EmbeddingGradient:
    """The embedding's fp32 gradient, between the forward and backward passes of micro-batches.

    GPipe runs many forward passes before the first backward pass. All of them add to one tensor,
    and the last of their backward passes returns it.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.open: WeakSet[_Pass] = WeakSet()  # a pass whose loss is dropped disappears from it
        self.num_added = self.num_returned = 0

    def begin(self, weight: Tensor) -> tuple[_Pass, Tensor]:
        """A new forward pass, and the tensor to which it adds."""
        if self.total is None or not self.open:
            self.total = torch.zeros_like(weight, dtype=torch.float32)
            self.num_added = self.num_returned = 0
        self.num_added += 1
        self.open.add(new := _Pass())
        return new, self.total

    def end(self, ended: _Pass) -> Tensor | None:
        """A backward pass: the sum if it is the last one, else nothing."""
        self.open.remove(ended)
        self.num_returned += 1
        if self.open:
            return None
        # The sum would contain the gradient of a loss that was dropped while others were open.
        assert self.num_returned == self.num_added, "a forward pass had no backward pass"
        total, self.total = self.total, None
        return total


class _Pass:
    pass


def next_token_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    factor: Factor,
    sums: EmbeddingGradient | None = None,
) -> Tensor:
    """factor · sum of cross entropies, without the padding rows of the vocabulary."""
    # For a small vocabulary, all logits at once are faster and fit into memory.
    if weight.shape[0] >= LARGE_VOCAB:
        return chunked_loss(x, weight, labels, vocab_size, factor, sums)
    logits = F.linear(x, weight)[..., :vocab_size].flatten(0, 1).float()
    total = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total * multiplier(factor)


class Exchange:
    """A collective that is under way: other work can be done until `result`."""

    def __init__(self, tensor: Tensor, work: Work | None = None) -> None:
        self.tensor, self.work = tensor, work

    def result(self) -> Tensor:
        if self.work is not None:
            wait_for(self.work)
        return self.tensor


class VocabGroup(Protocol):
    """Ranks that hold different rows of the embedding; `parallel/tensor.py` implements it."""

    rank: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: this rank holds all rows."""

    def whole(self, x: Tensor) -> Exchange:
        """All tokens, of which each rank may hold a part."""

    def sum(self, x: Tensor) -> Exchange:
        """The sum over all ranks, or this rank's part of it. Overwrites `x`."""


class OneRank:
    """A rank that holds all rows, and exchanges nothing."""

    rank, group = 0, None

    def whole(self, x: Tensor) -> Exchange:
        return Exchange(x)

    def sum(self, x: Tensor) -> Exchange:
        return Exchange(x)


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    factor: Factor,
    sums: EmbeddingGradient | None = None,
    mp: VocabGroup | None = None,
) -> Tensor:
    """The same in chunks. With `mp`, this rank holds its part of the rows of the embedding.

    `sums` belongs to the weight; losses with the same one must be differentiated alike.
    """
    sums, mp = sums or EmbeddingGradient(), mp or OneRank()
    loss: Tensor = _ChunkedLoss.apply(x, weight, labels.flatten(), vocab_size, factor, sums, mp)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, while the logits of a chunk exist.

    That is why `factor` is an argument: the forward pass has to know it. Ranks also sum the
    gradient of `x` there, so that they keep only their parts of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        factor: Factor,
        sums: EmbeddingGradient,
        mp: VocabGroup,
    ) -> Tensor:
        device, (wants_x, wants_weight) = x.device.type, ctx.needs_input_grad[:2]
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x, first_row = mp.whole(x).result(), mp.rank * len(weight)
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if wants_x else None
        ctx.sums, (ctx.own, dw) = sums, sums.begin(weight) if wants_weight else (None, None)
        tokens, length = x.flatten(0, 1), chunk_length(behaviour(x.device), len(weight))
        # Casts are explicit below: the weight is converted once for all chunks.
        with torch.autocast(device, enabled=False):
            rows = weight.to(half)
            for start in range(0, len(tokens), length):
                chunk = slice(start, start + length)
                part = tokens[chunk].to(half)
                logits = (part @ rows.T).float()
                logits[:, max(0, vocab_size - first_row) :] = -torch.inf
                entropy, gradient = _entropy(logits, labels[chunk], first_row, mp.group)
                loss += entropy
                if wants_x or wants_weight:
                    gradient = gradient.mul_(multiplier(factor)).to(half)
                if dx is not None:
                    dx.flatten(0, 1)[chunk] = gradient @ rows
                    if chunk.stop >= len(tokens):  # summed during the last product below
                        sum_of_dx = mp.sum(dx)
                if dw is not None and half == torch.float32:
                    dw.addmm_(gradient.T, part)  # saves a temporary of the embedding's size
                elif dw is not None:
                    dw += gradient.T @ part  # sum in fp32: half precision loses small parts
        ctx.weight_dtype, ctx.dx = weight.dtype, None if dx is None else sum_of_dx.result()
        return loss * multiplier(factor)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        dx = None if ctx.dx is None else ctx.dx.mul_(outer[0])
        dw = None if ctx.own is None else ctx.sums.end(ctx.own)
        if dw is not None:
            dw = dw.mul_(outer[0]).to(ctx.weight_dtype)
        ctx.dx = None  # free the memory as soon as possible
        return dx, dw, None, None, None, None, None


def _entropy(
    logits: Tensor, labels: Tensor, first_row: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The sum of cross entropies, and its gradient, which overwrites the logits.

    With a group, ranks exchange two small messages whose size does not depend on V.
    """
    highest = logits.amax(-1)
    if group:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits.sub_(highest[:, None])  # so that exp() cannot overflow
    # A label is in the rows of exactly one rank; the others contribute zero to the sum.
    own = labels - first_row
    here = (own >= 0) & (own < logits.shape[1])
    own = own.masked_fill(~here, 0)[:, None]
    wanted = logits.gather(1, own).squeeze(1).masked_fill(~here, 0.0)
    logits.exp_()
    sums = torch.stack([logits.sum(-1), wanted])
    if group:
        dist.all_reduce(sums, group=group)
    is_predicted = labels != IGNORED
    entropy = ((sums[0].log() - sums[1]) * is_predicted).sum()
    gradient = logits.div_(sums[0][:, None])  # softmax, then minus one at the label
    gradient.scatter_add_(1, own, -here.to(gradient.dtype)[:, None])
    return entropy, gradient.mul_(is_predicted[:, None])
