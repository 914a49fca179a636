"""The GPT: learned positions, pre-norm blocks, GELU, tied embedding. Knows nothing of parallelism.

A GPT builds its layers with `Components`. Another set of them, like that of tensor parallelism,
may create layers that compute differently, but with the same names.

Shapes: B samples, T tokens, C hidden, H heads, D = C / H, V padded vocabulary.
A model holds a range of layers. The first range also embeds tokens, and the last one also computes
logits. Names and initial values of parameters do not depend on the range.
A `Session` replaces parts of a forward pass: `trainer/inference/` has some. Training has none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config.sections import Model
from trainer.layout import padded_vocab
from trainer.loss import EmbeddingGradient, Factor, OneRank, VocabGroup, next_token_loss
from trainer.slices import Slice

# Elements per random stream: a rank can then create the rows it holds without drawing all others.
INIT_BLOCK = 1 << 22


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: `build_model` sets the values.

        torch's initialization would import its compiler, which takes a second.
        """


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear`."""


class Head(nn.Module):
    """Logits from the embedding's weight, or directly their loss."""

    def __init__(self, vocab_size: int, mp: VocabGroup | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size  # without padding
        self.sums, self.mp = EmbeddingGradient(), mp or OneRank()

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None, factor: Factor) -> Tensor:
        if labels is None:
            return self.logits(x, weight)
        return next_token_loss(x, weight, labels, self.vocab_size, factor, self.sums)


class Session(Protocol):
    """What a forward pass does that is not for training: a cache, or more than a loss."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of the tokens: (T), or (B, T) if they differ."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core of a layer, each (B, H, T, D)."""

    def result(self, head: Head, x: Tensor, weight: Tensor) -> Tensor:
        """What the last layer returns, from the hidden states (B, T, C) and the embedding."""


class Compiler:
    """How layers are compiled: not at all. `compiling.py` has another one."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def eager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a layer that compiled code calls as it is.

        Call it once for all layers: code is compiled again for every other function it calls.
        """
        return function


class Components:
    """Creates the layers of a GPT. The methods that create one have the name it gets there."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.compiler = compiler or Compiler()
        # Not compiled, because torch's compiler does not restore random states.
        self.again = self.compiler.eager(_recomputed)

    def word_embeddings(self, vocab: int, hidden: int) -> Embedding:
        return Embedding(vocab, hidden)

    def position_embeddings(self, length: int, hidden: int) -> Embedding:
        return Embedding(length, hidden)

    def qkv_proj(self, hidden: int) -> Linear:
        # Rows are ordered (head, 3, D), so that splitting them over ranks splits between heads.
        return Linear(hidden, 3 * hidden)

    def out_proj(self, hidden: int) -> Linear:
        return Linear(hidden, hidden)

    def linear1(self, hidden: int, ffn: int) -> Linear:
        return Linear(hidden, ffn)

    def linear2(self, ffn: int, hidden: int) -> Linear:
        return Linear(ffn, hidden)

    def head(self, vocab_size: int) -> Head:
        return Head(vocab_size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """The attention core: softmax(QK)V, each (B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


class SelfAttention(nn.Module):
    def __init__(self, model: Model, layer: int, components: Components) -> None:
        super().__init__()
        self.number, self.head_dim = layer, model.hidden_size // model.num_attention_heads
        self.qkv_proj = components.qkv_proj(model.hidden_size)
        self.out_proj = components.out_proj(model.hidden_size)
        self.attend = components.attend
        self.dropout = model.attention_probs_dropout_prob
        self.out_dropout = model.hidden_dropout_prob
        self.recompute_core, self.again = _recomputes(model, layer, "core_attn"), components.again

    def forward(self, x: Tensor, session: Session | None = None) -> Tensor:
        qkv = self.qkv_proj(x)
        batch, length = qkv.shape[:2]
        # Each of q, k, v is (B, H, T, D). H is -1 here: with tensor parallelism it is a part of H.
        qkv = qkv.view(batch, length, -1, 3, self.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        if session is not None:
            y = session.attend(self.number, q, k, v)
        elif self.recompute_core and self.training:
            y = self.again(self._core, self.dropout, q, k, v)
        else:
            y = self._core(q, k, v)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return _dropped(self.out_proj(y), self.out_dropout, self.training)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return self.attend(q, k, v, dropout)


class Block(nn.Module):
    def __init__(self, model: Model, layer: int, components: Components) -> None:
        super().__init__()
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        self.norm1 = nn.LayerNorm(hidden)
        self.self_attn = SelfAttention(model, layer, components)
        self.norm2 = nn.LayerNorm(hidden)
        self.linear1 = components.linear1(hidden, ffn)
        self.linear2 = components.linear2(ffn, hidden)
        self.dropout = model.hidden_dropout_prob
        self.max_dropout = max(model.hidden_dropout_prob, model.attention_probs_dropout_prob)
        self.layer, self.again = components.compiler.compiled(self._layer), components.again
        self.recompute_attention = _recomputes(model, layer, "full_attn")
        self.recompute_all = _recomputes(model, layer, "full")

    def forward(self, x: Tensor, session: Session | None = None) -> Tensor:
        if session is not None:
            return self._layer(x, session)  # not compiled: the shapes of a cache change
        if self.recompute_all and self.training:
            return _recomputed(self.layer, self.max_dropout, x)
        y: Tensor = self.layer(x)
        return y

    def _layer(self, x: Tensor, session: Session | None = None) -> Tensor:
        if self.recompute_attention and self.training:
            x = x + self.again(self.self_attn, self.max_dropout, self.norm1(x))
        else:
            x = x + self.self_attn(self.norm1(x), session)
        # The tanh approximation, as in GPT-2.
        y = self.linear2(F.gelu(self.linear1(self.norm2(x)), approximate="tanh"))
        return x + _dropped(y, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(
        self,
        model: Model,
        layers: range | None = None,
        recompute_interval: int = 1,
        components: Components | None = None,
    ) -> None:
        super().__init__()
        components = components or Components()
        hidden = model.hidden_size
        layers = range(model.num_layers) if layers is None else layers
        self.first_layer = layers.start
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.num_layers
        assert model.vocab_size is not None, "count the vocabulary before building the model"
        if self.is_first or self.is_last:
            vocab = padded_vocab(model.vocab_size, model.vocab_size_divisible_unit)
            self.word_embeddings = components.word_embeddings(vocab, hidden)
        if self.is_first:
            length = model.max_position_embeddings
            self.position_embeddings = components.position_embeddings(length, hidden)
        # By layer number, so that names do not depend on the range of layers.
        self.layers = nn.ModuleDict(
            {str(layer): Block(model, layer, components) for layer in layers}
        )
        self.runs = _runs([*self.layers.values()], recompute_interval)
        if self.is_last:
            self.norm = nn.LayerNorm(hidden)
            self.head = components.head(model.vocab_size)
        self.dropout = model.hidden_dropout_prob

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        factor: Factor = 1.0,
        session: Session | None = None,
    ) -> Tensor:
        """Input: tokens (B, T) for the first layer, else the output (B, T, C) of the previous one.

        Output of the last layer: logits (B, T, V), or with labels (B, T) the loss, which is
        factor · the sum of cross entropies, or the result of a session.
        """
        if self.is_first:
            x = self._embedded(x, session)
        if session is None:
            for run in self.runs:
                x = run(x)
        else:
            for block in self.layers.values():
                x = block(x, session)
        if not self.is_last:
            return x
        if session is None:
            return self.head(self.norm(x), self.word_embeddings.weight, labels, factor)
        return session.result(self.head, self.norm(x), self.word_embeddings.weight)

    def _embedded(self, tokens: Tensor, session: Session | None) -> Tensor:
        if session is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = session.positions(tokens.shape[1], tokens.device)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return _dropped(x, self.dropout, self.training)


def _runs(blocks: list[Any], interval: int) -> list[Callable[[Tensor], Tensor]]:
    """The layers to call in order. Consecutive, fully recomputed layers are grouped."""
    runs: list[Callable[[Tensor], Tensor]] = []
    while blocks:
        together = list(takewhile(lambda block: block.recompute_all, blocks[:interval]))
        runs.append(_RecomputeGroup(together) if len(together) > 1 else blocks[0])
        blocks = blocks[max(1, len(together)) :]
    return runs


class _RecomputeGroup:
    """Layers that are recomputed together: only the first one keeps its input.

    Not a module, because the layers are already registered in the model, under their own names.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        for block in blocks:
            block.recompute_all = False  # the group recomputes them, not each block again

    def __call__(self, x: Tensor) -> Tensor:
        if self.blocks[0].training:
            return _recomputed(self._layers, self.blocks[0].max_dropout, x)
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(model: Model, seed: int, device: torch.device, layers: range | None = None) -> GPT:
    """A model with its initial weights on one device."""
    with torch.device("meta"):  # without memory, and without torch's initial values
        gpt = GPT(model, layers)
    gpt.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(initial_value(name, Slice.of(parameter.shape), model, seed))
    return gpt


def initial_value(name: str, piece: Slice, model: Model, seed: int) -> Tensor:
    """The initial value of a piece of a parameter.

    It depends only on name and seed, so that all layouts start from the same weights.
    """
    if name.endswith("bias"):
        return torch.zeros(piece.sizes)
    if "norm" in name:
        return torch.ones(piece.sizes)
    std = model.initializer_range
    # As in GPT-2: these two add to the residual stream, so their sum must not grow with depth.
    if name.endswith(("out_proj.weight", "linear2.weight")):
        std /= math.sqrt(2 * model.num_layers)
    (rows, width), (first, left), (count, columns) = piece.whole, piece.offsets, piece.sizes
    length = max(1, INIT_BLOCK // width)  # rows per block
    value = torch.empty(count, columns)
    for number in range(first // length, -(-(first + count) // length)):
        begin, end = number * length, min(rows, (number + 1) * length)
        # A hash, because similar seeds can give correlated streams.
        key = hashlib.sha256(f"{seed}:{name}:{number}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        block = torch.empty(end - begin, width).normal_(0.0, std, generator=random)
        low, high = max(begin, first), min(end, first + count)
        value[low - first : high - first] = block[low - begin : high - begin, left : left + columns]
    return value


def _dropped(x: Tensor, probability: float, training: bool) -> Tensor:
    return F.dropout(x, probability, training) if probability else x


def _recomputes(model: Model, layer: int, granularity: str) -> bool:
    return (
        model.use_recompute
        and model.recompute_granularity == granularity
        and layer not in model.no_recompute_layers
    )


def _recomputed(function: Callable[..., Tensor], dropout: float, *inputs: Tensor) -> Tensor:
    """Call a function that stores no activations: the backward pass runs it again, same dropout."""
    # Saving the random state costs time, and without dropout nothing is random.
    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0
    )
    return result
