"""The GPT: learned positions, pre-norm blocks, GELU, tied embedding. One class that knows nothing of parallelism.

Shapes: B samples, T tokens, C hidden, H heads, D = C / H, V padded vocabulary.
A model holds the blocks of a range of layers; the first range also embeds, the last one also makes logits. Parameters
have the same names and the same initial values whichever range they are in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config.sections import Model
from trainer.errors import UserError
from trainer.layout import padded_vocab

INIT_BLOCK = 1 << 22  # elements that one random stream fills, so that a rank can make only the rows it holds


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: `build_model` gives the values, and torch's own way imports its compiler, which takes a second."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as above."""


class SelfAttention(nn.Module):
    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.head_dim = hidden // model.num_attention_heads
        self.qkv_proj = Linear(hidden, 3 * hidden)  # rows are (head, 3, D): cutting them cuts between heads
        self.out_proj = Linear(hidden, hidden)
        self.dropout, self.out_dropout = model.attention_probs_dropout_prob, model.hidden_dropout_prob
        self.recompute_core = _recomputes(model, layer, "core_attn")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        batch, length = qkv.shape[:2]
        q, k, v = qkv.view(batch, length, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4).unbind(0)  # B, H, T, D each
        core = _recomputed(self._core, self.dropout) if self.recompute_core and self.training else self._core
        y = core(q, k, v).transpose(1, 2).reshape(batch, length, -1)
        return _dropped(self.out_proj(y), self.out_dropout, self.training)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


class Block(nn.Module):
    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.hidden_size)
        self.self_attn = SelfAttention(model, layer)
        self.norm2 = nn.LayerNorm(model.hidden_size)
        self.linear1 = Linear(model.hidden_size, model.ffn_hidden_size)
        self.linear2 = Linear(model.ffn_hidden_size, model.hidden_size)
        self.dropout = model.hidden_dropout_prob
        self.max_dropout = max(model.hidden_dropout_prob, model.attention_probs_dropout_prob)
        self.recompute_attention = _recomputes(model, layer, "full_attn")
        self.recompute_all = _recomputes(model, layer, "full")

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute_all and self.training:
            return _recomputed(self._layer, self.max_dropout)(x)
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        attention: Callable[[Tensor], Tensor] = self.self_attn
        if self.recompute_attention and self.training:
            attention = _recomputed(attention, self.max_dropout)
        x = x + attention(self.norm1(x))
        y = self.linear2(F.gelu(self.linear1(self.norm2(x)), approximate="tanh"))
        return x + _dropped(y, self.dropout, self.training)


class Head(nn.Module):
    """Logits from the embedding's own weight. A module without parameters: a place for others to take hold of."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class GPT(nn.Module):
    def __init__(self, model: Model, layers: range | None = None) -> None:
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.num_layers
        assert model.vocab_size is not None, "a character vocabulary is counted before the model is built"
        if self.is_first or self.is_last:
            vocab = padded_vocab(model.vocab_size, model.vocab_size_divisible_unit)
            self.word_embeddings = Embedding(vocab, model.hidden_size)
        if self.is_first:
            self.position_embeddings = Embedding(model.max_position_embeddings, model.hidden_size)
        self.layers = nn.ModuleDict({str(layer): Block(model, layer) for layer in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(model.hidden_size)
            self.head = Head()
        self.dropout = model.hidden_dropout_prob

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) into the first layer, or what the layer before made (B, T, C); logits (B, T, V) out."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.word_embeddings(x) + self.position_embeddings(positions)
            x = _dropped(x, self.dropout, self.training)
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x), self.word_embeddings.weight) if self.is_last else x


def build_model(model: Model, seed: int, device: torch.device, layers: range | None = None) -> GPT:
    with torch.device("meta"):
        gpt = GPT(model, layers)
    try:
        gpt.to_empty(device=device)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        hint = "make the model smaller; `gptctl validate` estimates the bytes per rank"
        raise UserError(f"the model does not fit into the memory of {device}", hint) from None
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, model, seed))
    return gpt


def initial_value(name: str, shape: torch.Size, model: Model, seed: int) -> Tensor:
    """The whole parameter as a function of its name and the seed, so that every layout starts from the same weights."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape)
    std = model.initializer_range
    if name.endswith(("out_proj.weight", "linear2.weight")):  # they add to the residual stream, twice per layer
        std /= math.sqrt(2 * model.num_layers)
    value = torch.empty(shape)
    for number, block in enumerate(value.split(max(1, INIT_BLOCK // shape[1]))):
        key = hashlib.sha256(f"{seed}:{name}:{number}".encode()).digest()
        block.normal_(0.0, std, generator=torch.Generator().manual_seed(int.from_bytes(key[:7], "big")))
    return value


def _dropped(x: Tensor, probability: float, training: bool) -> Tensor:
    return F.dropout(x, probability, training) if probability else x


def _recomputes(model: Model, layer: int, granularity: str) -> bool:
    return model.use_recompute and model.recompute_granularity == granularity and layer not in model.no_recompute_layers


def _recomputed(function: Callable[..., Tensor], dropout: float) -> Callable[..., Tensor]:
    """The function without its activations: backward runs it again, with the same dropout."""

    def run(*inputs: Any) -> Tensor:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0)

    return run
