"""A GPT with the training loop that small trainers have, written from nanoGPT's description: the strongest peer on a CPU.

One file, no configuration, no logging but the loss: what remains is the model, random windows of the data, AdamW with two
groups, clipping, and a cosine schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LOG_INTERVAL = 10  # steps between two losses that are read


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.size()
        parts = self.c_attn(x).split(hidden, dim=2)
        q, k, v = (part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, hidden))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(hidden), Attention(hidden, heads), nn.LayerNorm(hidden)
        self.c_fc, self.gelu, self.c_proj = nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, vocab: int, layers: int, hidden: int, heads: int, block: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(block, hidden)
        self.h, self.ln_f = nn.ModuleList(Block(hidden, heads) for _ in range(layers)), nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def train(
    vocab: int, size: tuple[int, ...], steps: int, after_step: Callable[[], None], is_fused: bool, is_compiled: bool
) -> None:
    """`is_fused`: torch's fused AdamW, which nanoGPT uses on GPUs only."""
    layers, hidden, heads, block, batch = size
    data = torch.randint(0, vocab, (100_000,))
    raw = NanoGPT(vocab, layers, hidden, heads, block)
    model = torch.compile(raw) if is_compiled else raw
    decayed = [parameter for parameter in raw.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in raw.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=is_fused)

    def batch_of() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - block, (batch,)).tolist()
        return (
            torch.stack([data[start : start + block] for start in starts]),
            torch.stack([data[start + 1 : start + 1 + block] for start in starts]),
        )

    tokens, targets = batch_of()
    for step in range(steps):
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / steps)) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(tokens, targets)
        tokens, targets = batch_of()  # before the backward pass, as nanoGPT does
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_INTERVAL == 0:
            float(loss)
        after_step()
