"""The memory of a rank through one update: a walk over its forward and backward passes.

Knows what is kept from pass to pass: training state, gradients, gathered parameters, activations
and messages. `tape.py` knows what happens inside of a pass. `tests/distributed/test_memory.py`
compares the result with counted bytes (`trainer/rehearse.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.named_tuple import NamedTuple
from trainer.rank_plan import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Chunk,
    Matrix,
    RankPlan,
    all_matrices,
    elements,
    embeddings,
    final_norm,
    layer_groups,
    matrices,
    passes,
    shard_elements,
)
from trainer.tape import (
    Cost,
    ElementBytes,
    Gradients,
    LayerTapes,
    Tape,
    cost,
    head_tapes,
    layer_tapes,
)

MOST_LAYERS = 256  # of a chunk that is followed layer by layer
ENOUGH = 3  # micro-batches without a pipeline: the first, one in between, the last


class EstimatedPeak(NamedTuple):
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


def peak_memory(run: RunConfig, layout: Layout, rank: int) -> EstimatedPeak:
    """The peak of a rank, without what torch and the driver need for themselves."""
    count = few_micro_batches(run, layout)
    run = replace(run, Engine=replace(run.Engine, accumulate_steps=count))
    chunks = layout.pp * run.Model.virtual_pp_degree
    if run.Model.num_layers <= MOST_LAYERS * chunks:
        return _Walk(RankPlan(run, layout, rank)).peak()
    # No model has so many layers, but the answer must not take minutes: every layer adds the same.
    few, many = (
        peak_memory(replace(run, Model=replace(run.Model, num_layers=size * chunks)), layout, rank)
        for size in (MOST_LAYERS // 2, MOST_LAYERS)
    )
    more = 2 * (run.Model.num_layers / chunks / MOST_LAYERS - 1)
    levels: Any = [b + more * (b - a) for a, b in zip(few[:6], many[:6])]
    return many._replace(**dict(zip(EstimatedPeak._fields, levels)))


class _Walk:
    """The levels of all kinds of memory, and the highest sum so far."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan, self.layout, self.model = plan, plan.layout, plan.run.Model
        self.sizes = ElementBytes.of(plan.run, plan.layout)
        self.chunks, self.stage = plan.chunks, plan.run.Distributed.sharding.sharding_stage
        self.layer_matrices = matrices(self.model, self.layout.mp)
        self.layer = layer_tapes(plan, self.sizes)
        self.head = head_tapes(plan, self.sizes, self.layer)
        everything = all_matrices(plan)
        self.total, self.shard = elements(everything), self._own(everything)
        held = self.shard if self.is_sharded else self.total
        self.parameters = self.sizes.parameter * held
        self.optimizer = self.sizes.optimizer * held
        self.gradients = 4 * self.total if self.sizes.has_buckets else 0.0
        self.gathered, self.sent = 0.0, 0.0
        self.activations = 16.0 * plan.tokens * plan.micro_batches  # tokens and labels
        self.message = self.layer.part * self.sizes.message
        self.backwards = [0] * len(self.chunks)
        self.present: set[tuple[int, int]] = set()  # gathered groups: chunk and layer, -1: the rest
        self.flat = self.reducing = 0.0  # buffers of FSDP's last gather and reduction
        self.best = EstimatedPeak()

    @property
    def is_sharded(self) -> bool:
        return self.layout.sharding > 1

    def _rest(self, chunk: Chunk) -> list[Matrix]:
        return [*embeddings(self.plan, chunk), *final_norm(self.plan, chunk)]

    def _own(self, found: Iterable[Matrix]) -> int:
        """Elements of the first rank's shards: no other rank has larger ones."""
        return shard_elements(found, self.layout.sharding)

    def peak(self) -> EstimatedPeak:
        for index, when in passes(self.plan):
            if when == FORWARD:
                self._forward(index, self.chunks[index])
            else:
                self._backward(index, self.chunks[index])
                self.backwards[index] += 1
        self._end_of_update()
        return self.best

    def _note(self, phase: str, tape: Tape) -> Cost:
        """Add a tape to the present levels, which it does not change."""
        found = cost(tape)
        held = (self.parameters, self.gradients, self.optimizer, self.gathered, self.activations)
        now = EstimatedPeak(*held, self.flat + self.reducing + found.peak, phase)
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
        for recomputed, layers in layer_groups(self.plan, chunk.layers):
            for layer in layers:
                self._gather((index, layer))
                self._copy_weights(index, layer)
                tape = _forward_tape(self.layer, recomputed)
                if recomputed == "full" and layer > layers[0]:
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
        layer, weight = self.layer, self.sizes.parameter
        weight = self.sizes.used if self.is_sharded else weight
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
        return self.sizes.used * self._own(self._group(*group)) * self.layout.sharding

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
        is_last = self.backwards[index] + 1 == self.plan.micro_batches
        keeps = self.stage < 3 or (phase == BACKWARD and self.layout.pp > 1)
        if not self.is_sharded or (keeps and not (phase == BACKWARD and is_last)):
            return
        self.present.discard((index, layer))
        self.gathered -= self._size((index, layer))

    # Backward passes

    def _how(self, index: int) -> Gradients:
        """What happens to gradients in this backward pass."""
        p, is_first = self.sizes, self.backwards[index] == 0
        if self.is_sharded:
            # fp32 gradients are added to whole ones if those are kept, all others are new.
            is_new = is_first or p.used < 4 or not self._accumulates()
            return Gradients(p.used, False, is_new)
        is_cast = self.layer.uses_autocast
        return Gradients(p.used, is_cast, is_first and not p.has_buckets)

    def _reduces(self, index: int) -> bool:
        is_last = self.backwards[index] + 1 == self.plan.micro_batches
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
        for recomputed, layers in reversed([*layer_groups(self.plan, chunk.layers)]):
            again = list[float]()
            if recomputed == "full":
                again = [*layer.forward() * (len(layers) - 1), *layer.recomputed()]
            for layer_number in reversed(layers):
                has_next = layer_number > chunk.layers[0]
                following = (index, layer_number - 1) if has_next else None
                self._gather_again((index, layer_number), following)
                tape = layer.backward(how, attention_again=recomputed == "full_attn")
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
        layer, weight = self.layer, self.sizes.parameter
        weight = self.sizes.used if self.is_sharded else weight
        whole, (word, position, *_) = layer.whole * weight, embeddings(self.plan, chunk)
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
        whole, how = elements(found), self._how(index)
        if not self.is_sharded:
            if how.stays:
                self.activations -= 4 * whole
                self.gradients += 4 * whole
            return
        used, is_first = self.sizes.used, self.backwards[index] == 0
        own, padded = 4 * self._own(found), 4 * self._own(found) * self.layout.sharding
        self._release(index, layer, BACKWARD)
        if how.stays:
            self.activations -= used * whole
        accumulated = 0.0 if self._accumulates() else own
        if not self._reduces(index):
            if is_first:
                self._note(BACKWARD, [used * whole, (4 - used) * whole])
                self.gradients += 4 * whole
            return
        self.reducing = 0.0
        waiting = 4 * whole if self._accumulates() and not is_first else 0.0
        self._note(BACKWARD, [padded + (used * whole if how.stays and not waiting else 0.0)])
        self.gradients -= waiting
        self.reducing = padded
        self._note(BACKWARD, [own])
        if is_first or not accumulated:
            self.gradients += own

    def _accumulates(self) -> bool:
        """Whether whole gradients are kept until the last micro-batch."""
        return self.plan.micro_batches > 1 and (self.stage == 1 or self.layout.pp > 1)

    def _end_of_update(self) -> None:
        self.flat = self.reducing = 0.0
        everything = all_matrices(self.plan)
        if self.model.sequence_parallel and self.layout.mp > 1:
            self._note(BACKWARD, [4 * self._own(x for x in everything if not x.is_split)])
        if self.layout.pp > 1 and any(chunk.is_first or chunk.is_last for chunk in self.chunks):
            rows = [Matrix(self.plan.vocab_rows, self.model.hidden_size)]
            self._note(BACKWARD, [4 * self._own(rows)])
        self.gathered = self.activations = 0.0
        self._note(UPDATE, [])


def _forward_tape(layer: LayerTapes, recomputed: str) -> Tape:
    if recomputed == "full":
        return layer.unsaved()
    return layer.forward(keeps_attention=recomputed != "full_attn")
