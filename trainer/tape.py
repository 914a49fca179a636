"""What a pass through one layer, the embeddings or the head allocates and frees, in order.

A tape is a list of bytes: positive ones are allocated, negative ones are freed. It follows the code
of `model.py`, `parallel/tensor.py` and `loss.py`, and what torch keeps for the backward pass.
Small tensors (biases, statistics per token) are added to their large neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.logit_chunks import LARGE_VOCAB
from trainer.named_tuple import NamedTuple
from trainer.rank_plan import RankPlan, elements, matrices

Tape = list[float]


class Cost(NamedTuple):
    """The highest level of a tape, and its level at the end, both from 0."""

    peak: float
    net: float


def cost(tape: Iterable[float]) -> Cost:
    levels = [0.0, *accumulate(tape)]
    return Cost(max(levels), levels[-1])


class ElementBytes(NamedTuple):
    """Bytes per element of what a rank holds."""

    parameter: int
    used: int  # by products: of gathered parameters, and of activations
    residual: int
    message: int
    optimizer: int
    has_buckets: bool  # fp32 gradients that are always there

    @staticmethod
    def of(run: RunConfig, layout: Layout) -> ElementBytes:
        amp, is_sharded = run.Engine.mix_precision, layout.sharding > 1
        if not amp.enable:
            return ElementBytes(4, 4, 4, 4, 8, layout.dp > 1 and not is_sharded)
        if is_sharded:
            return ElementBytes(4, 2, 2, 2, 8, False)
        if amp.level == "O1":
            return ElementBytes(4, 2, 4, 2, 8, layout.dp > 1)
        return ElementBytes(2, 2, 2, 2, 12, True)


class Weights(NamedTuple):
    """Elements of a layer's parameters on one rank: of products, each with its bias and norm."""

    qkv: float
    out: float
    linear1: float
    linear2: float


class Gradients(NamedTuple):
    """What happens to the gradient of a weight when it has been computed."""

    product: int  # bytes per element of the product that computes it
    is_cast: bool  # to fp32, by the backward pass of a cast or of tensor parallelism
    stays: bool  # it is the first of an update, or FSDP still has to reduce it

    def made(self, elements: float) -> Tape:
        return [self.product * elements]

    def stored(self, elements: float) -> Tape:
        """After the operation that made it has freed what it needed."""
        size, tape = self.product, list[float]()
        if self.is_cast:
            size, tape = 4, [4.0 * elements, -self.product * elements]
        return tape if self.stays else [*tape, -size * elements]


class LayerTapes(NamedTuple):
    """One layer on one rank; sizes are elements of a micro-batch."""

    part: float  # hidden states, with sequence_parallel this rank's part of them
    whole: float  # hidden states of all tokens
    own: float  # hidden states of this rank's heads
    ffn: float
    half: int  # bytes of what is computed, 4 in fp32
    residual: int  # bytes of the hidden states between layers
    per_token: float  # bytes of a norm's statistics
    scores: float  # bytes that attention keeps beside its result
    mask: float  # bytes that dropout keeps
    mp: int
    sequence: bool
    weights: Weights

    @property
    def uses_autocast(self) -> bool:
        return self.residual > self.half

    @property
    def hidden(self) -> float:
        return self.part * self.half

    @property
    def stream(self) -> float:
        """Bytes of the hidden states between layers."""
        return self.part * self.residual

    @property
    def gathered(self) -> float:
        """Bytes of a gathered sequence."""
        return self.whole * self.half if self.sequence else 0.0

    # Forward pass, with everything that a backward pass needs

    def attention(self) -> Tape:
        qkv = 3 * self.own * self.half
        weight = self._temporary_weight(self.weights.qkv)
        tape = [*self._norm(), self.gathered, weight, qkv, -weight, -self.gathered]
        tape += [qkv, -qkv] if self.sequence else []  # ordered by samples
        tape += [self.own * self.half + self.scores]
        reordered = self.own * self.half if self.sequence else 0.0
        return [*tape, reordered, *self._summed(reordered), *self._added()]

    def feed_forward(self) -> Tape:
        ffn, weight = self.ffn * self.half, self._temporary_weight(self.weights.linear1)
        tape = [*self._norm(), self.gathered, weight, ffn, -weight, -self.gathered]
        tape += [-4 * self.part] if self.uses_autocast else []
        tape += [ffn, *self._summed(0.0)]
        return [*tape, *self._added(has_norm=False)]

    def _norm(self) -> Tape:
        fp32 = [4 * self.part] if self.uses_autocast else []  # its result, before it is converted
        return [*fp32, self.hidden + self.per_token]

    def _summed(self, freed: float) -> Tape:
        """A product over a split dimension, its sum over the mp ranks, and the bias."""
        whole = self.whole * self.half
        if self.mp == 1:
            return [self.hidden, -freed]
        if not self.sequence:
            return [whole, whole, -whole]
        return [whole, -freed, self.hidden, self.hidden, -whole - self.hidden]

    def _added(self, has_norm: bool = True) -> Tape:
        """Dropout, and the sum with the hidden states of before."""
        tape = [self.hidden + self.mask, -self.hidden] if self.mask else []
        tape += [-4 * self.part] if self.uses_autocast and has_norm else []
        return [*tape, self.stream, -self.hidden]

    def _temporary_weight(self, elements: float) -> float:
        """Tensor parallelism converts weights in both passes; autocast keeps converted ones."""
        return self.half * elements if self.uses_autocast and self.mp > 1 else 0.0

    def forward(self, keeps_attention: bool = True) -> Tape:
        attention = self.attention()
        if not keeps_attention:
            peak = cost(attention).peak
            attention = [peak, 2 * self.stream - peak]  # its input and its result
        return [*attention, *self.feed_forward()]

    def recomputed(self) -> Tape:
        """Recomputation stops when the last tensor that the backward pass needs is there."""
        tape = self.forward()
        end = [*self._summed(0.0), *self._added(has_norm=False)]
        tape = tape[: -len(end)]
        if not self.mask:
            return tape
        return [*tape, *self._summed(0.0), self.hidden + self.mask, -2 * self.hidden]

    def unsaved(self) -> Tape:
        """A forward pass that keeps only its result: torch frees everything else early."""
        attention = cost(self.attention())
        ffn = self.ffn * self.half
        first = [attention.peak, -attention.peak, self.stream]
        norm = self.hidden * (1 + 2 * self.uses_autocast)
        return [*first, norm + self.gathered, ffn, -norm - self.gathered, ffn, -ffn,
                self.hidden, self.stream, -ffn - self.hidden, -self.stream]  # fmt: skip

    # Backward pass; the gradient of the layer's output is there already

    def feed_forward_backward(self, gradients: Gradients) -> Tape:
        ffn, converted = self.ffn * self.half, self._converted()
        weights = self.weights
        tape = [converted - self.mask, self.gathered, ffn, *gradients.made(weights.linear2)]
        tape += [-converted - self.gathered, -ffn, *gradients.stored(weights.linear2)]
        tape += [ffn, -2 * ffn]
        return [*tape, *self._column_backward(gradients, weights.linear1, ffn)]

    def attention_backward(self, gradients: Gradients) -> Tape:
        own, converted, weights = self.own * self.half, self._converted(), self.weights
        tape = [converted - self.mask, self.gathered, own]
        tape += [own, -own, own] if self.sequence else []
        tape += [*gradients.made(weights.out), -converted - self.gathered]
        tape += [-own] if self.sequence else []
        tape += [*gradients.stored(weights.out), 3 * own, -5 * own - self.scores]
        tape += [3 * own, -3 * own, 3 * own, -3 * own]
        return [*tape, *self._column_backward(gradients, weights.qkv, 3 * own)]

    def _converted(self) -> float:
        """The gradient after the backward pass of dropout or of a cast."""
        return self.hidden if self.mask or self.uses_autocast else 0.0

    def _column_backward(self, gradients: Gradients, elements: float, freed: float) -> Tape:
        """A product with the result of a norm, the norm, and the sum with the residual gradient."""
        weight, whole = self._temporary_weight(elements), self.whole * self.half
        if self.sequence:
            tape = [whole, weight, whole, -weight, self.hidden, -whole]
        else:
            tape = [weight, whole, -weight]
        tape += gradients.made(elements)
        if self.mp > 1:
            tape += gradients.stored(elements)
        tape += [-self.gathered - freed - self.hidden]
        if self.mp == 1:
            tape += gradients.stored(elements)
        gradient = self.hidden
        if self.uses_autocast:
            tape += [4 * self.part, -gradient]
            gradient = 4 * self.part
        tape += [self.stream, -gradient, -self.stream - self.per_token]
        return [*tape, -self.stream]

    def backward(self, gradients: Gradients, attention_again: bool = False) -> Tape:
        """`attention_again`: the forward pass of attention has to be repeated first."""
        again = [cost(self.attention()).net - 2 * self.stream] if attention_again else []
        tape = self.feed_forward_backward(gradients)
        return [*tape, *again, *self.attention_backward(gradients)]


class HeadTapes(NamedTuple):
    """Final norm, logits and loss."""

    layer: LayerTapes
    tokens: float
    rows: float  # of the embedding on this rank
    vocab: float  # of them, without padding
    hidden_size: float
    chunk: float  # tokens per chunk; 0: all logits at once
    weight: int  # bytes of a weight
    has_embedding: bool  # the same rank embeds tokens: its gradient waits for that

    @property
    def embedding(self) -> float:
        return self.rows * self.hidden_size

    def forward(self) -> Tape:
        layer, half = self.layer, self.layer.half
        if self.chunk:
            return self._chunked()
        logits, true = self.tokens * self.rows, self.tokens * self.vocab
        tape = [*layer._norm(), half * logits]
        tape += [4 * true, -half * logits] if half < 4 else []
        tape += [4 * true, -4 * (logits if half == 4 else true)]
        return [*tape, -4 * layer.part] if layer.uses_autocast else tape

    def _chunked(self) -> Tape:
        layer, half = self.layer, self.layer.half
        sums, rows = 4 * self.embedding, half * self.embedding
        whole, tokens = layer.whole * half, min(self.chunk, self.tokens)
        logits, several = tokens * self.rows, self.tokens > self.chunk
        copy = rows if half < self.weight else 0.0
        tape = [*layer._norm(), layer.gathered, whole, sums, copy]
        if half == 4:
            tape += [4 * logits, *([4 * logits, -4 * logits] if several else [])]
            tape += [tokens * self.hidden_size * 4, -tokens * self.hidden_size * 4, -4 * logits]
        else:
            before = 6 * logits if several else 0.0  # of the chunk before, while the next begins
            tape += [before, 2 * logits, 4 * logits, -2 * logits - before * 2 / 3]
            tape += [2 * logits, -before / 3, rows, -rows, -6 * logits]
        result = layer.hidden if layer.sequence else 0.0
        tape += [result, -copy - layer.gathered - (whole if layer.sequence else 0.0)]
        return [*tape, -sum(layer._norm()) + layer.per_token]

    def backward(self, gradients: Gradients) -> Tape:
        layer, half = self.layer, self.layer.half
        if self.chunk:
            tape = []
            if self.weight < 4:
                tape += [self.weight * self.embedding, -4 * self.embedding]
            tape += [
                0.0 if gradients.stays or self.has_embedding else -self.weight * self.embedding
            ]
            fp32 = [4 * layer.part, -layer.hidden] if layer.uses_autocast else []
            gradient = 4 * layer.part if layer.uses_autocast else layer.hidden
            return [*tape, *fp32, layer.stream, -gradient - layer.stream - layer.per_token]
        logits, true = self.tokens * self.rows, self.tokens * self.vocab
        tape = [4 * true, 4 * true, -8 * true]
        tape += [half * true, -4 * true] if half < 4 else []
        tape += [half * logits, -half * true] if self.vocab < self.rows else []
        tape += [*gradients.made(self.embedding), layer.hidden, -half * logits - layer.hidden]
        gradient = layer.hidden
        if layer.uses_autocast:
            tape, gradient = [*tape, 4 * layer.part, -gradient], 4 * layer.part
        stored = gradients._replace(stays=True) if self.has_embedding else gradients
        tape += stored.stored(self.embedding)
        return [*tape, layer.stream, -gradient - layer.stream - layer.per_token]


def layer_tapes(plan: RankPlan, sizes: ElementBytes) -> LayerTapes:
    model, mp = plan.run.Model, plan.layout.mp
    whole = plan.tokens * model.hidden_size
    sequence = model.sequence_parallel and mp > 1
    part = whole / mp if sequence else whole
    norm1, norm2, qkv, qkv_bias, out, out_bias, *rest = matrices(model, mp)
    _, _, linear1, bias1, linear2, bias2 = rest
    weights = Weights(
        elements([norm1, norm2, qkv, qkv_bias]),
        elements([out, out_bias]),
        elements([norm1, norm2, linear1, bias1]),
        elements([linear2, bias2]),
    )
    on_gpu = plan.device == "cuda"
    mask = part * (1 if on_gpu else sizes.used) if model.hidden_dropout_prob else 0.0
    heads = model.num_attention_heads / mp
    scores = 4 * plan.tokens * heads
    if model.attention_probs_dropout_prob and not on_gpu:
        # torch's CPU kernel keeps what it drops: the softmax, its result and the mask.
        scores = plan.tokens * plan.run.Data.Train.dataset.max_seq_len * heads * 12
    return LayerTapes(
        part,
        whole,
        whole / mp,
        plan.tokens * model.ffn_hidden_size / mp,
        sizes.used,
        sizes.residual,
        2 * 4 * part / model.hidden_size,
        scores,
        mask,
        mp,
        sequence,
        weights,
    )


def head_tapes(plan: RankPlan, sizes: ElementBytes, layer: LayerTapes) -> HeadTapes:
    rows = plan.vocab_rows
    is_chunked = rows >= LARGE_VOCAB or plan.layout.mp > 1
    weight = sizes.used if plan.layout.sharding > 1 else sizes.parameter
    return HeadTapes(
        layer,
        plan.tokens,
        rows,
        min(rows, plan.run.Model.vocab_size or rows),
        plan.run.Model.hidden_size,
        plan.logit_tokens if is_chunked else 0,
        weight,
        plan.layout.pp == 1,
    )
