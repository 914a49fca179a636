"""What a rank sends in an update: every collective, its size, and the least that the theory needs.

Computed from the config alone. `trainer/counting.py` counts the same in a run, and
`tests/distributed/test_collectives.py` compares the two.
Sizes: s tokens, b samples and m micro-batches per update, h hidden, V padded vocabulary, n ranks of
a group. The theory: Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al.
2022) and ZeRO (Rajbhandari et al. 2020), with gradients in fp32, and hidden states and gathered
parameters in half precision where that is enabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.rank_plan import (
    BACKWARD,
    FORWARD,
    SIZES,
    UPDATE,
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

FP32 = 4
SUMMARY = 4  # numbers in fp64: loss, squared norm of the gradient, predicted tokens, stop requests
ACTIVE_CHUNKS = 3  # that torch's interleaved schedule keeps gathered

PADDED = "FSDP pads the rows of every parameter to a multiple of the ranks"
REPEATED = "every mp rank sends the whole hidden state; sequence_parallel sends a part of it"
ONE_MESSAGE = "position embeddings need only an all-gather, but travel in the message of the norms"


class Row(NamedTuple):
    """Calls of one kind in an update. `nbytes`: of the whole message, before it is split."""

    what: str
    operation: str
    axis: str
    ranks: int  # of the group
    dtype: str
    nbytes: int
    when: str
    calls: int
    needed: int  # bytes that a rank sends per update, at least
    reason: str = ""  # why it sends more

    @property
    def sent(self) -> int:
        """Bytes that a rank sends per update, with a ring algorithm."""
        return on_the_wire(self.operation, self.ranks, self.nbytes * self.calls)


def on_the_wire(operation: str, ranks: int, nbytes: int) -> int:
    """The bytes that each rank of a group sends. Those it receives are counted by the sender."""
    rounds = {"all_reduce": 2 * (ranks - 1), "send": ranks, "recv": 0}
    return nbytes * rounds.get(operation, ranks - 1) // ranks


def collectives(run: RunConfig, layout: Layout, rank: int) -> list[Row]:
    """The table of one rank. Rows of size 0 and calls that do not happen are left out."""
    plan = RankPlan(run, layout, rank)
    if layout.world == 1:
        return []
    rows = [
        *(_tensor_parallel(plan) if layout.mp > 1 else []),
        *(_pipeline(plan) if layout.pp > 1 else []),
        *(_sharding(plan) if layout.sharding > 1 else _data_parallel(plan)),
        *_shared_gradients(plan),
        _summary(plan),
    ]
    return [row for row in rows if row.calls and row.nbytes]


def _summary(plan: RankPlan) -> Row:
    """Logged steps also send the step times of the ranks; usually few steps are logged."""
    are_logged = plan.run.Engine.logging_freq == 1
    size = 8 * (SUMMARY + (plan.layout.world if are_logged else 0))
    return _row(plan, "summary of the step", "all_reduce", "world", "float64", size, UPDATE, 1)


def _row(
    plan: RankPlan,
    what: str,
    operation: str,
    axis: str,
    dtype: str,
    nbytes: int,
    when: str,
    calls: int,
    needed: int | None = None,
    reason: str = "",
) -> Row:
    """A row; `needed`: bytes on the wire, if they are fewer than ours."""
    ranks = {"world": plan.layout.world, "tied": 2, **plan.layout._asdict()}[axis]
    row = Row(what, operation, axis, ranks, dtype, nbytes, when, calls, 0)
    least = row.sent if needed is None else min(needed, row.sent)
    return row._replace(needed=least, reason=reason if least < row.sent else "")


# Tensor parallelism


def _tensor_parallel(plan: RankPlan) -> Iterator[Row]:
    m, layers = plan.micro_batches, sum(len(chunk.layers) for chunk in plan.chunks)
    again = _recomputed(plan)
    if plan.run.Model.sequence_parallel:
        yield from _sequence_parallel(plan, m * layers, again)
    else:
        yield _hidden(plan, "output of out_proj, linear2", "all_reduce", FORWARD, 2 * m * layers)
        yield _hidden(plan, "the same, recomputed", "all_reduce", BACKWARD, m * again.sums)
        yield _hidden(plan, "gradient at qkv_proj, linear1", "all_reduce", BACKWARD, 2 * m * layers)
    for chunk in plan.chunks:
        if chunk.is_first:
            yield from _embedding(plan)
        if chunk.is_last:
            yield from _head(plan)


def _hidden(plan: RankPlan, what: str, operation: str, when: str, calls: int) -> Row:
    return _row(plan, what, operation, "mp", plan.dtype, plan.hidden_bytes, when, calls)


def _sequence_parallel(plan: RankPlan, layer_passes: int, again: Recomputed) -> Iterator[Row]:
    """Each all-reduce is a reduce-scatter and an all-gather, which send as much together.

    A rank keeps its part of the inputs of qkv_proj and linear1 only, so the backward pass gathers
    them again: Megatron-LM does so too.
    """
    m, gather, scatter = plan.micro_batches, "all_gather", "reduce_scatter"
    yield _hidden(plan, "input of qkv_proj, linear1", gather, FORWARD, 2 * layer_passes)
    yield _hidden(plan, "output of out_proj, linear2", scatter, FORWARD, 2 * layer_passes)
    yield _hidden(plan, "input, recomputed", gather, BACKWARD, m * again.gathers)
    yield _hidden(plan, "output, recomputed", scatter, BACKWARD, m * again.sums)
    yield _hidden(plan, "gradient at out_proj, linear2", gather, BACKWARD, 2 * layer_passes)
    yield _hidden(plan, "input of qkv_proj, linear1", gather, BACKWARD, 2 * layer_passes)
    yield _hidden(plan, "gradient at qkv_proj, linear1", scatter, BACKWARD, 2 * layer_passes)


def _embedding(plan: RankPlan) -> Iterator[Row]:
    m = plan.micro_batches
    if not plan.run.Model.sequence_parallel:
        yield _hidden(plan, "word embeddings", "all_reduce", FORWARD, m)
        return
    yield _hidden(plan, "word embeddings", "reduce_scatter", FORWARD, m)
    yield _hidden(plan, "gradient at the word embeddings", "all_gather", BACKWARD, m)


def _head(plan: RankPlan) -> Iterator[Row]:
    m = plan.micro_batches
    if plan.run.Model.sequence_parallel:
        # Not again in the backward pass: the loss computes its gradients in the forward pass.
        yield _hidden(plan, "input of the head", "all_gather", FORWARD, m)
        yield _hidden(plan, "gradient at the head", "reduce_scatter", FORWARD, m)
    else:
        yield _hidden(plan, "gradient at the head", "all_reduce", FORWARD, m)
    whole, rest = divmod(plan.tokens, plan.logit_tokens)
    for tokens, count in ((plan.logit_tokens, whole), (rest, 1)):
        for what, numbers in (("largest logit", 1), ("sum of exponentials, own logit", 2)):
            yield _row(
                plan,
                f"loss: {what}",
                "all_reduce",
                "mp",
                "float32",
                FP32 * numbers * tokens,
                FORWARD,
                m * count,
            )


class Recomputed(NamedTuple):
    """Collectives per micro-batch that the recomputation in a backward pass repeats."""

    sums: int = 0  # after out_proj and linear2
    gathers: int = 0  # before qkv_proj and linear1, with sequence_parallel


def _recomputed(plan: RankPlan) -> Recomputed:
    """Recomputation stops at the last tensor that a backward pass needs.

    Without dropout, that is the input of the last product; its sum is not repeated.
    """
    model = plan.run.Model
    if not model.use_recompute or model.recompute_granularity == "core_attn":
        return Recomputed()
    skipped = 0 if model.hidden_dropout_prob else 1
    groups = [group for chunk in plan.chunks for group in layer_groups(plan, chunk.layers)]
    lengths = [len(layers) for granularity, layers in groups if granularity]
    per_layer = 2 if model.recompute_granularity == "full" else 1
    return Recomputed(
        sum(per_layer * length - skipped for length in lengths), per_layer * sum(lengths)
    )


# Pipeline


def _pipeline(plan: RankPlan) -> Iterator[Row]:
    m, mp = plan.micro_batches, plan.layout.mp
    nbytes, part = plan.hidden_bytes, plan.hidden_bytes // mp
    if plan.run.Model.sequence_parallel:
        nbytes = part
    before = sum(not chunk.is_first for chunk in plan.chunks)
    behind = sum(not chunk.is_last for chunk in plan.chunks)
    for what, operation, when, chunks in (
        ("hidden states", "recv", FORWARD, before),
        ("hidden states", "send", FORWARD, behind),
        ("gradient of hidden states", "recv", BACKWARD, behind),
        ("gradient of hidden states", "send", BACKWARD, before),
    ):
        calls = m * chunks
        yield _row(
            plan, what, operation, "pp", plan.dtype, nbytes, when, calls, part * calls, REPEATED
        )


# Sharding and data parallelism


def _data_parallel(plan: RankPlan) -> Iterator[Row]:
    """The buckets: gradients in the reverse order of the parameters, up to a size."""
    if plan.layout.dp == 1:
        return
    limit = plan.run.Distributed.bucket_cap_mb * (1 << 20)
    sizes, size = list[int](), 0
    for matrix in reversed(all_matrices(plan)):
        size += FP32 * matrix.rows * matrix.columns
        if size >= limit:
            sizes, size = [*sizes, size], 0
    sizes += [size] if size else []
    for nbytes in dict.fromkeys(sizes):
        calls = sizes.count(nbytes)
        yield _row(
            plan, "bucket of gradients", "all_reduce", "dp", "float32", nbytes, BACKWARD, calls
        )


def _sharding(plan: RankPlan) -> Iterator[Row]:
    layer = matrices(plan.run.Model, plan.layout.mp)
    gathered = _gathers(plan)
    for index, chunk in enumerate(plan.chunks):
        ends = [*embeddings(plan, chunk), *final_norm(plan, chunk)]
        yield from _sharded(plan, "layer", layer, len(chunk.layers), gathered[index])
        yield from _sharded(plan, "embeddings, final norm", ends, 1, gathered[index])


def _sharded(
    plan: RankPlan, what: str, found: list[Matrix], count: int, gathered: dict[str, int]
) -> Iterator[Row]:
    """What FSDP sends for `count` groups of parameters of the same size."""
    layout, stage = plan.layout, plan.run.Distributed.sharding.sharding_stage
    m, n, size = plan.micro_batches, layout.sharding, SIZES[plan.dtype]
    shard = shard_elements(found, n)
    true_part = elements(found) * (n - 1) // n  # that a rank has to send of it
    for when in (FORWARD, BACKWARD):
        calls = count * gathered[when]
        yield _row(
            plan,
            f"parameters: {what}",
            "all_gather",
            "sharding",
            plan.dtype,
            n * shard * size,
            when,
            calls,
            true_part * size * calls,
            PADDED,
        )
    # A pipeline adds up whole gradients, in every stage.
    reduces = count * (m if stage > 1 and layout.pp == 1 else 1)
    yield _row(
        plan,
        f"gradients: {what}",
        "reduce_scatter",
        "sharding",
        "float32",
        n * shard * FP32,
        BACKWARD,
        reduces,
        true_part * FP32 * reduces,
        PADDED,
    )
    if layout.dp > 1:
        needed = on_the_wire("all_reduce", layout.dp, elements(found) * FP32 // n * count)
        yield _row(
            plan,
            f"reduced gradients: {what}",
            "all_reduce",
            "dp",
            "float32",
            shard * FP32,
            BACKWARD,
            count,
            needed,
            PADDED,
        )


def _gathers(plan: RankPlan) -> dict[int, dict[str, int]]:
    """How often the passes of each chunk find its parameters sharded, and have to gather them."""
    keeps = plan.run.Distributed.sharding.sharding_stage < 3
    is_pipeline = plan.layout.pp > 1
    counts = {index: {FORWARD: 0, BACKWARD: 0} for index in range(len(plan.chunks))}
    present, order = set[int](), passes(plan)
    for position, (index, when) in enumerate(order):
        if len(counts) > ACTIVE_CHUNKS:
            present &= _next_chunks(order, position)
        counts[index][when] += index not in present
        # A pipeline keeps them after a backward pass, until the last one of the update.
        if keeps or (when == BACKWARD and is_pipeline):
            present.add(index)
        else:
            present.discard(index)
    return counts


def _next_chunks(order: list[tuple[int, str]], position: int) -> set[int]:
    """The chunks that torch keeps gathered: those of the next passes."""
    found = set[int]()
    for later in range(position, len(order)):
        found.add(order[later][0])
        if len(found) == ACTIVE_CHUNKS:
            break
    return found


# Gradients that several ranks of a pipeline or an mp group have a part of


def _shared_gradients(plan: RankPlan) -> Iterator[Row]:
    layout, found = plan.layout, all_matrices(plan)
    if layout.mp > 1 and plan.run.Model.sequence_parallel:
        shared = [matrix for matrix in found if not matrix.is_split]
        nbytes = FP32 * _own_elements(plan, shared)
        positions = FP32 * _own_elements(plan, [x for x in shared if x.is_position])
        needed = on_the_wire("all_reduce", layout.mp, nbytes)
        needed -= on_the_wire("all_gather", layout.mp, positions)
        yield _row(
            plan,
            "gradients of norms, biases and positions",
            "all_reduce",
            "mp",
            "float32",
            nbytes,
            UPDATE,
            1,
            needed,
            ONE_MESSAGE,
        )
    if layout.pp > 1 and any(chunk.is_first or chunk.is_last for chunk in plan.chunks):
        embedding = [Matrix(plan.vocab_rows, plan.run.Model.hidden_size)]
        nbytes = FP32 * _own_elements(plan, embedding)
        yield _row(
            plan,
            "gradient of the tied embedding",
            "all_reduce",
            "tied",
            "float32",
            nbytes,
            UPDATE,
            1,
        )


def _own_elements(plan: RankPlan, found: list[Matrix]) -> int:
    """Elements of this rank's shards."""
    at = plan.layout.coordinates(plan.rank)
    return shard_elements(found, plan.layout.sharding, at.sharding)
