"""The memory of a rank through one update: a walk over its forward and backward passes.

Knows what is kept from pass to pass: training state, gradients, gathered parameters, activations
and messages. `tape.py` knows what happens inside of a pass. `tests/distributed/test_memory.py`
compares the result with counted bytes (`trainer/rehearse.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.sender import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Chunk,
    Matrix,
    Sender,
    embeddings,
    final_norm,
    matrices,
    passes,
)
from trainer.tape import Cost, Gradients, HeadTapes, LayerTapes, Tape, Weights, cost

# For a large vocabulary, the loss is computed for a chunk of tokens at a time. CHUNK_LOGITS limits
# the logits of a chunk; GPUs need large matrix products to be fast.
LARGE_VOCAB = 32_768
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}
MOST_LAYERS = 256  # of a chunk that is followed layer by layer
ENOUGH = 3  # micro-batches without a pipeline: the first, one in between, the last


class Peak(NamedTuple):
    """Bytes at the moment of an update that needs most of them, by what they are for."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0  # by sharding; and half-precision copies of O1
    activations: float = 0.0  # kept from the forward to the backward pass
    temporary: float = 0.0
    phase: str = UPDATE

    @property
    def total(self) -> float:
        return sum(self[:6])


def few_micro_batches(run: RunConfig, layout: Layout) -> int:
    """As few micro-batches as have the same peak as all of them."""
    count, pp = run.Engine.accumulate_steps or 1, layout.pp
    if pp == 1:
        return min(count, ENOUGH)
    if run.Model.virtual_pp_degree > 1:
        # Two rounds through all chunks. Rounds that are not of pp micro-batches stay as they are.
        return min(count, 2 * pp) if count % pp == 0 else count
    # GPipe keeps all of them.
    return count if run.Distributed.pp_schedule == "GPipe" else min(count, pp + 2)


def peak_memory(run: RunConfig, layout: Layout, rank: int) -> Peak:
    """The peak of a rank, without what torch and the driver need for themselves."""
    count = few_micro_batches(run, layout)
    run = replace(run, Engine=replace(run.Engine, accumulate_steps=count))
    chunks = layout.pp * run.Model.virtual_pp_degree
    if run.Model.num_layers <= MOST_LAYERS * chunks:
        return _Walk(Sender(run, layout, rank)).peak()
    # No model has so many layers, but the answer must not take minutes: every layer adds the same.
    few, many = (
        peak_memory(replace(run, Model=replace(run.Model, num_layers=size * chunks)), layout, rank)
        for size in (MOST_LAYERS // 2, MOST_LAYERS)
    )
    more = 2 * (run.Model.num_layers / chunks / MOST_LAYERS - 1)
    levels: Any = [b + more * (b - a) for a, b in zip(few[:6], many[:6])]
    return many._replace(**dict(zip(Peak._fields, levels)))


class _Precision(NamedTuple):
    """Bytes per element."""

    parameter: int
    used: int  # by products: of gathered parameters, and of activations
    residual: int
    message: int
    optimizer: int
    has_buckets: bool  # fp32 gradients that are always there

    @staticmethod
    def of(run: RunConfig, layout: Layout) -> _Precision:
        amp, is_sharded = run.Engine.mix_precision, layout.sharding > 1
        if not amp.enable:
            return _Precision(4, 4, 4, 4, 8, layout.dp > 1 and not is_sharded)
        if is_sharded:
            return _Precision(4, 2, 2, 2, 8, False)
        if amp.level == "O1":
            return _Precision(4, 2, 4, 2, 8, layout.dp > 1)
        return _Precision(2, 2, 2, 2, 12, True)


class _Walk:
    """The levels of all kinds of memory, and the highest sum so far."""

    def __init__(self, sender: Sender) -> None:
        self.sender, self.layout, self.model = sender, sender.layout, sender.run.Model
        self.precision = _Precision.of(sender.run, sender.layout)
        self.chunks, self.stage = sender.chunks, sender.run.Distributed.sharding.sharding_stage
        self.layer_matrices = matrices(self.model, self.layout.mp)
        self.layer = _layer_tapes(sender, self.precision)
        self.head = _head_tapes(sender, self.precision, self.layer)
        everything = [each for chunk in self.chunks for each in self._matrices(chunk)]
        self.total, self.shard = _elements(everything), self._own(everything)
        held = self.shard if self.is_sharded else self.total
        self.parameters = self.precision.parameter * held
        self.optimizer = self.precision.optimizer * held
        self.gradients = 4 * self.total if self.precision.has_buckets else 0.0
        self.gathered, self.sent = 0.0, 0.0
        self.activations = 16.0 * sender.tokens * sender.micro_batches  # tokens and labels
        self.message = self.layer.part * self.precision.message
        self.forwards = [0] * len(self.chunks)
        self.backwards = [0] * len(self.chunks)
        self.present: set[tuple[int, int]] = set()  # gathered groups: chunk and layer, -1: the rest
        self.flat = self.reducing = 0.0  # buffers of FSDP's last gather and reduction
        self.best = Peak()

    @property
    def is_sharded(self) -> bool:
        return self.layout.sharding > 1

    def _matrices(self, chunk: Chunk) -> list[Matrix]:
        return [*self._rest(chunk), *self.layer_matrices * len(chunk.layers)]

    def _rest(self, chunk: Chunk) -> list[Matrix]:
        return [*embeddings(self.sender, chunk), *final_norm(self.sender, chunk)]

    def _own(self, found: Iterable[Matrix]) -> int:
        """Elements of the first rank's shards: no other rank has larger ones."""
        n = self.layout.sharding
        return sum(-(-matrix.rows // n) * matrix.columns for matrix in found)

    def peak(self) -> Peak:
        for index, when in passes(self.sender):
            if when == FORWARD:
                self._forward(index, self.chunks[index])
                self.forwards[index] += 1
            else:
                self._backward(index, self.chunks[index])
                self.backwards[index] += 1
        self._end_of_update()
        return self.best

    def _note(self, phase: str, tape: Tape) -> Cost:
        """Add a tape to the present levels, which it does not change."""
        found = cost(tape)
        held = (self.parameters, self.gradients, self.optimizer, self.gathered, self.activations)
        now = Peak(*held, self.flat + self.reducing + found.peak, phase)
        self.best = max(self.best, now, key=lambda peak: peak.total)
        return found

    # Forward passes

    def _forward(self, index: int, chunk: Chunk) -> None:
        received = 0.0 if chunk.is_first else self.message
        if not chunk.is_first:
            received += self.layer.stream if self.layer.uses_autocast else 0.0
        self.activations += received
        self._gather((index, -1))
        if chunk.is_first:
            self.activations += self._note(FORWARD, self._embed()).net
        for number, layers in _groups(self.sender, chunk):
            for layer in layers:
                self._gather((index, layer))
                self._copy_weights(index, layer)
                tape = self.layer.unsaved() if number else _kept(self.sender, self.layer)
                if number and layer > layers[0]:
                    tape = [*tape, -self.layer.stream]  # the input of the group is enough
                self.activations += self._note(FORWARD, tape).net
                self._release(index, layer, FORWARD)
        if chunk.is_last:
            self.activations += self._note(FORWARD, self.head.forward()).net
        elif self.layer.uses_autocast:
            self.activations += self._note(FORWARD, [self.message, -self.layer.stream]).net
        self._release(index, -1, FORWARD)
        self.flat = 0.0

    def _embed(self) -> Tape:
        layer, weight = self.layer, self.precision.parameter
        weight = self.precision.used if self.is_sharded else weight
        word, tape = layer.whole * weight, [layer.whole * weight]
        if self.layout.mp > 1 and (layer.uses_autocast or layer.sequence):
            tape += [layer.hidden, -word]
            word = layer.hidden
        tape += [layer.stream, -word]
        return [*tape, layer.stream + layer.mask, -layer.stream] if layer.mask else tape

    def _copy_weights(self, index: int, layer: int) -> None:
        """O1: autocast converts weights once per update; tensor parallelism does some itself."""
        if not self.layer.uses_autocast or (index, layer) in self.present:
            return
        self.present.add((index, layer))
        weights = self.layer.weights
        copied = weights.out + weights.linear2
        copied += weights.qkv + weights.linear1 if self.layout.mp == 1 else 0.0
        self.gathered += 2 * copied

    # Sharding

    def _group(self, index: int, layer: int) -> list[Matrix]:
        return self._rest(self.chunks[index]) if layer < 0 else self.layer_matrices

    def _size(self, group: tuple[int, int]) -> float:
        """Bytes of a gathered group."""
        return self.precision.used * self._own(self._group(*group)) * self.layout.sharding

    def _gather(self, group: tuple[int, int]) -> None:
        """Gather a group into one buffer, and copy from there; the next gather frees the buffer."""
        if not self.is_sharded or group in self.present:
            return
        self.present.add(group)
        size = self._size(group)
        self._note(FORWARD, [2 * size])
        self.gathered, self.flat = self.gathered + size, size

    def _gather_again(self, group: tuple[int, int], following: tuple[int, int] | None) -> None:
        """In a backward pass, the buffer of the following group is filled during this one."""
        if not self.is_sharded:
            return
        if group not in self.present:
            self.present.add(group)
            self.flat = 0.0
            self._note(BACKWARD, [2 * self._size(group)])
            self.gathered += self._size(group)
        is_sharded = following is not None and following not in self.present
        self.flat = self._size(following) if following and is_sharded else 0.0

    def _release(self, index: int, layer: int, phase: str) -> None:
        """Free a group after a pass, if the stage says so."""
        is_last = self.backwards[index] + 1 == self.sender.micro_batches
        keeps = self.stage < 3 or (phase == BACKWARD and self.layout.pp > 1)
        if not self.is_sharded or (keeps and not (phase == BACKWARD and is_last)):
            return
        self.present.discard((index, layer))
        self.gathered -= self._size((index, layer))

    # Backward passes

    def _how(self, index: int) -> Gradients:
        """What happens to gradients in this backward pass."""
        p, is_first = self.precision, self.backwards[index] == 0
        if self.is_sharded:
            # fp32 gradients are added to whole ones if those are kept, all others are new.
            is_new = is_first or p.used < 4 or not self._accumulates()
            return Gradients(p.used, False, is_new)
        is_cast = self.layer.uses_autocast
        return Gradients(p.used, is_cast, is_first and not p.has_buckets)

    def _reduces(self, index: int) -> bool:
        is_last = self.backwards[index] + 1 == self.sender.micro_batches
        return is_last or (self.stage > 1 and self.layout.pp == 1)

    def _backward(self, index: int, chunk: Chunk) -> None:
        how, layer = self._how(index), self.layer
        # The gradient of the output. It is held until the end, so the first sum is a new tensor.
        copy = 0.0 if chunk.is_last else layer.stream
        self.activations += 0.0 if chunk.is_last else self.message
        if layer.uses_autocast:
            self.activations, copy = self.activations + copy, 0.0
        self._gather_again((index, -1), (index, chunk.layers[-1]))
        if chunk.is_last:
            self._differentiate(index, -2, self.head.backward(how))
        for number, layers in reversed(_groups(self.sender, chunk)):
            again = [*layer.forward() * (len(layers) - 1), *layer.recomputed()] if number else []
            for layer_number in reversed(layers):
                has_next = layer_number > chunk.layers[0]
                following = (index, layer_number - 1) if has_next else None
                self._gather_again((index, layer_number), following)
                tape = _backward_tape(self.sender, layer, how, bool(number))
                self._differentiate(index, layer_number, [*again, *tape])
                self.activations, copy, again = self.activations + copy, 0.0, []
        if chunk.is_first:
            self._differentiate(index, -1, self._embed_backward(how, chunk))
        else:
            self.activations -= layer.stream + self.sent  # until the next one is sent
            self.sent = layer.stream
            self.activations += self.sent
        if not chunk.is_last:
            self.activations -= 2 * self.message
        if not chunk.is_first:
            self.activations -= self.message if layer.uses_autocast else 0.0
        self._finish_group(index, -1)

    def _embed_backward(self, how: Gradients, chunk: Chunk) -> Tape:
        layer, weight = self.layer, self.precision.parameter
        weight = self.precision.used if self.is_sharded else weight
        whole, (word, position, *_) = layer.whole * weight, embeddings(self.sender, chunk)
        words, positions = (matrix.rows * matrix.columns for matrix in (word, position))
        how = how._replace(product=weight, is_cast=False)
        tape = [layer.stream, -layer.stream - layer.mask] if layer.mask else []
        tape += [*how.made(positions), *how.stored(positions)]
        tape += [layer.gathered, whole, -layer.gathered] if self.layout.mp > 1 else []
        tape += [*how.made(words), -layer.stream, -whole if self.layout.mp > 1 else 0.0]
        if chunk.is_last:  # added to the gradient of the head
            tape += [-weight * words]
        return [*tape, *how.stored(words)]

    def _differentiate(self, index: int, layer: int, tape: Tape) -> None:
        """Note a backward pass, and move the gradients that it leaves to their own level."""
        net = self._note(BACKWARD, tape).net
        self.activations += net
        if layer >= 0:
            self._finish_group(index, layer)

    def _finish_group(self, index: int, layer: int) -> None:
        found = self._group(index, layer)
        elements, how = _elements(found), self._how(index)
        if not self.is_sharded:
            if how.stays:
                self.activations -= 4 * elements
                self.gradients += 4 * elements
            return
        used, is_first = self.precision.used, self.backwards[index] == 0
        own, padded = 4 * self._own(found), 4 * self._own(found) * self.layout.sharding
        self._release(index, layer, BACKWARD)
        if how.stays:
            self.activations -= used * elements
        accumulated = 0.0 if self._accumulates() else own
        if not self._reduces(index):
            if is_first:
                self._note(BACKWARD, [used * elements, (4 - used) * elements])
                self.gradients += 4 * elements
            return
        self.reducing = 0.0
        waiting = 4 * elements if self._accumulates() and not is_first else 0.0
        self._note(BACKWARD, [padded + (used * elements if how.stays and not waiting else 0.0)])
        self.gradients -= waiting
        self.reducing = padded
        self._note(BACKWARD, [own])
        if is_first or not accumulated:
            self.gradients += own

    def _accumulates(self) -> bool:
        """Whether whole gradients are kept until the last micro-batch."""
        return self.sender.micro_batches > 1 and (self.stage == 1 or self.layout.pp > 1)

    def _end_of_update(self) -> None:
        self.flat = self.reducing = 0.0
        everything = [each for chunk in self.chunks for each in self._matrices(chunk)]
        if self.model.sequence_parallel and self.layout.mp > 1:
            self._note(BACKWARD, [4 * self._own(x for x in everything if not x.is_split)])
        if self.layout.pp > 1 and any(chunk.is_first or chunk.is_last for chunk in self.chunks):
            rows = [Matrix(self.sender.vocab_rows, self.model.hidden_size)]
            self._note(BACKWARD, [4 * self._own(rows)])
        self.gathered = self.activations = 0.0
        self._note(UPDATE, [])


def _elements(found: Iterable[Matrix]) -> int:
    return sum(matrix.rows * matrix.columns for matrix in found)


def _groups(sender: Sender, chunk: Chunk) -> list[tuple[int, range]]:
    """The layers in order; with the number of a group that is fully recomputed together, or 0."""
    model, found, layers = sender.run.Model, list[tuple[int, range]](), chunk.layers
    is_full = model.use_recompute and model.recompute_granularity == "full"
    interval = sender.run.Distributed.pp_recompute_interval if sender.layout.pp > 1 else 1
    exempt = frozenset(model.no_recompute_layers)
    while layers:
        count = 0
        while is_full and count < min(interval, len(layers)):
            if layers[count] in exempt:
                break
            count += 1
        found.append((len(found) + 1 if count else 0, layers[: max(1, count)]))
        layers = layers[max(1, count) :]
    return found


def _recomputes_attention(sender: Sender) -> bool:
    model = sender.run.Model
    return model.use_recompute and model.recompute_granularity == "full_attn"


def _kept(sender: Sender, layer: LayerTapes) -> Tape:
    """A forward pass of a layer that is not recomputed as a whole."""
    attention = layer.attention()
    if _recomputes_attention(sender):
        found, kept = cost(attention), layer.stream + layer.part * layer.residual
        attention = [found.peak, kept - found.peak]
    return [*attention, *layer.feed_forward()]


def _backward_tape(sender: Sender, layer: LayerTapes, how: Gradients, is_full: bool) -> Tape:
    attention = layer.attention_backward(how)
    if _recomputes_attention(sender) and not is_full:
        found = cost(layer.attention())
        kept = layer.stream + layer.part * layer.residual
        attention = [found.net - kept, *attention]
    return [*layer.feed_forward_backward(how), *attention]


def _layer_tapes(sender: Sender, precision: _Precision) -> LayerTapes:
    model, mp = sender.run.Model, sender.layout.mp
    whole = sender.tokens * model.hidden_size
    sequence = model.sequence_parallel and mp > 1
    part = whole / mp if sequence else whole
    norm1, norm2, qkv, qkv_bias, out, out_bias, *rest = matrices(model, mp)
    _, _, linear1, bias1, linear2, bias2 = rest
    weights = Weights(
        _elements([norm1, norm2, qkv, qkv_bias]),
        _elements([out, out_bias]),
        _elements([norm1, norm2, linear1, bias1]),
        _elements([linear2, bias2]),
    )
    on_gpu = sender.run.Global.device == "gpu"
    mask = part * (1 if on_gpu else precision.used) if model.hidden_dropout_prob else 0.0
    heads = model.num_attention_heads / mp
    scores = 4 * sender.tokens * heads
    if model.attention_probs_dropout_prob and not on_gpu:
        # torch's CPU kernel keeps what it drops: the softmax, its result and the mask.
        scores = sender.tokens * sender.run.Data.Train.dataset.max_seq_len * heads * 12
    return LayerTapes(
        part,
        whole,
        whole / mp,
        sender.tokens * model.ffn_hidden_size / mp,
        precision.used,
        precision.residual,
        2 * 4 * part / model.hidden_size,
        scores,
        mask,
        mp,
        sequence,
        weights,
    )


def _head_tapes(sender: Sender, precision: _Precision, layer: LayerTapes) -> HeadTapes:
    device = "cuda" if sender.run.Global.device == "gpu" else "cpu"
    rows = sender.vocab_rows
    is_chunked = rows >= LARGE_VOCAB or sender.layout.mp > 1
    weight = precision.used if sender.layout.sharding > 1 else precision.parameter
    return HeadTapes(
        layer,
        sender.tokens,
        rows,
        min(rows, sender.run.Model.vocab_size or rows),
        sender.run.Model.hidden_size,
        max(1, CHUNK_LOGITS[device] // rows) if is_chunked else 0,
        weight,
        sender.layout.pp == 1,
    )
