"""The session that scores given tokens: the loss of each, and whether it is the most likely one.

Shapes: B samples, T tokens, N scored tokens, C hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.device import behaviour
from trainer.logit_chunks import chunk_length
from trainer.loss import IGNORED, VocabGroup
from trainer.model import Head


class Scoring:
    """Scores the labels (B, T), except those that are IGNORED."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def result(self, head: Head, x: Tensor, weight: Tensor) -> Tensor:
        """(2, B, T): losses, and 1 where the label is the most likely token; 0 if ignored."""
        wanted = self.labels != IGNORED
        # With overlapping windows, few tokens of each are scored: no logits for the others.
        tokens, labels = x[wanted], self.labels[wanted]
        scores = torch.zeros((2, *self.labels.shape), device=x.device)
        # All ranks of an mp group have the same tokens, so the same chunks.
        length = chunk_length(behaviour(x.device), weight.shape[0])
        chunks = [
            _scores(part, weight, wished, head.vocab_size, head.mp)
            for part, wished in zip(tokens.split(length), labels.split(length))
        ]
        if len(tokens):
            scores[:, wanted] = torch.cat(chunks, dim=1)
        return scores


def _scores(
    tokens: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, mp: VocabGroup
) -> Tensor:
    """(2, N). Ranks of an mp group exchange messages whose size does not depend on V."""
    first_row = mp.rank * weight.shape[0]
    logits = F.linear(tokens, weight).float()
    logits[:, max(0, vocab_size - first_row) :] = -torch.inf
    own_highest, best = logits.max(-1)
    highest = _reduced(own_highest.clone(), mp, dist.ReduceOp.MAX)
    # Of equal logits the first one, as argmax does: the same in all layouts.
    elsewhere = torch.full_like(best, vocab_size)
    best = torch.where(own_highest == highest, best + first_row, elsewhere)
    best = _reduced(best, mp, dist.ReduceOp.MIN)
    own = labels - first_row
    here = (own >= 0) & (own < logits.shape[1])
    wanted = logits.gather(1, own.masked_fill(~here, 0)[:, None]).squeeze(1)
    wanted = (wanted - highest).masked_fill(~here, 0.0)
    sums = torch.stack([(logits - highest[:, None]).exp_().sum(-1), wanted])
    sums = _reduced(sums, mp, dist.ReduceOp.SUM)
    return torch.stack([sums[0].log() - sums[1], (best == labels).float()])


def _reduced(values: Tensor, mp: VocabGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if mp.group:
        dist.all_reduce(values, operation, mp.group)
    return values
