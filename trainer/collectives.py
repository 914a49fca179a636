"""What a rank sends in an update: every collective, its size, and the least that the theory needs.

Computed from the config alone. `trainer/counting.py` counts the same in a run, and
`tests/distributed/test_collectives.py` compares the two.
Sizes: s tokens, b samples and m micro-batches per update, h hidden, V padded vocabulary, n ranks of
a group. The theory: Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al.
2022) and ZeRO (Rajbhandari et al. 2020), with gradients in fp32, and hidden states and gathered
parameters in half precision where that is enabled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.memory import CHUNK_LOGITS
from trainer.sender import (
    BACKWARD,
    FORWARD,
    SIZES,
    UPDATE,
    Matrix,
    Row,
    Sender,
    all_matrices,
    embeddings,
    final_norm,
    matrices,
    on_the_wire,
    passes,
)

FP32 = 4
SUMMARY = 4  # numbers in fp64: loss, squared norm of the gradient, predicted tokens, stop requests
ACTIVE_CHUNKS = 3  # that torch's interleaved schedule keeps gathered

PADDED = "FSDP pads the rows of every parameter to a multiple of the ranks"
REPEATED = "every mp rank sends the whole hidden state; sequence_parallel sends a part of it"
ONE_MESSAGE = "position embeddings need only an all-gather, but travel in the message of the norms"


def collectives(run: RunConfig, layout: Layout, rank: int) -> list[Row]:
    """The table of one rank. Rows of size 0 and calls that do not happen are left out."""
    sender = Sender(run, layout, rank)
    if layout.world == 1:
        return []
    rows = [
        *(_tensor_parallel(sender) if layout.mp > 1 else []),
        *(_pipeline(sender) if layout.pp > 1 else []),
        *(_sharding(sender) if layout.sharding > 1 else _data_parallel(sender)),
        *_shared_gradients(sender),
        sender.row("summary of the step", "all_reduce", "world", "float64", 8 * SUMMARY, UPDATE, 1),
    ]
    return [row for row in rows if row.calls and row.nbytes]


# Tensor parallelism


def _tensor_parallel(sender: Sender) -> Iterator[Row]:
    m, layers = sender.micro_batches, sum(len(chunk.layers) for chunk in sender.chunks)
    again = _recomputed(sender)
    if sender.run.Model.sequence_parallel:
        yield from _sequence_parallel(sender, m * layers, again)
    else:
        yield _hidden(sender, "output of out_proj, linear2", "all_reduce", FORWARD, 2 * m * layers)
        yield _hidden(sender, "the same, recomputed", "all_reduce", BACKWARD, m * again.sums)
        yield _hidden(
            sender, "gradient at qkv_proj, linear1", "all_reduce", BACKWARD, 2 * m * layers
        )
    for chunk in sender.chunks:
        if chunk.is_first:
            yield from _embedding(sender)
        if chunk.is_last:
            yield from _head(sender)


def _hidden(sender: Sender, what: str, operation: str, when: str, calls: int) -> Row:
    return sender.row(what, operation, "mp", sender.dtype, sender.hidden_bytes, when, calls)


def _sequence_parallel(sender: Sender, layers: int, again: Recomputed) -> Iterator[Row]:
    """Each all-reduce is a reduce-scatter and an all-gather, which send as much together.

    A rank keeps its part of the inputs of qkv_proj and linear1 only, so the backward pass gathers
    them again: Megatron-LM does so too.
    """
    m, gather, scatter = sender.micro_batches, "all_gather", "reduce_scatter"
    yield _hidden(sender, "input of qkv_proj, linear1", gather, FORWARD, 2 * layers)
    yield _hidden(sender, "output of out_proj, linear2", scatter, FORWARD, 2 * layers)
    yield _hidden(sender, "input, recomputed", gather, BACKWARD, m * again.gathers)
    yield _hidden(sender, "output, recomputed", scatter, BACKWARD, m * again.sums)
    yield _hidden(sender, "gradient at out_proj, linear2", gather, BACKWARD, 2 * layers)
    yield _hidden(sender, "input of qkv_proj, linear1", gather, BACKWARD, 2 * layers)
    yield _hidden(sender, "gradient at qkv_proj, linear1", scatter, BACKWARD, 2 * layers)


def _embedding(sender: Sender) -> Iterator[Row]:
    m = sender.micro_batches
    if not sender.run.Model.sequence_parallel:
        yield _hidden(sender, "word embeddings", "all_reduce", FORWARD, m)
        return
    yield _hidden(sender, "word embeddings", "reduce_scatter", FORWARD, m)
    yield _hidden(sender, "gradient at the word embeddings", "all_gather", BACKWARD, m)


def _head(sender: Sender) -> Iterator[Row]:
    m = sender.micro_batches
    if sender.run.Model.sequence_parallel:
        # Not again in the backward pass: the loss computes its gradients in the forward pass.
        yield _hidden(sender, "input of the head", "all_gather", FORWARD, m)
        yield _hidden(sender, "gradient at the head", "reduce_scatter", FORWARD, m)
    else:
        yield _hidden(sender, "gradient at the head", "all_reduce", FORWARD, m)
    device = "cuda" if sender.run.Global.device == "gpu" else "cpu"
    length = max(1, CHUNK_LOGITS[device] // sender.vocab_rows)
    whole, rest = divmod(sender.tokens, length)
    for tokens, count in ((length, whole), (rest, 1)):
        for what, numbers in (("largest logit", 1), ("sum of exponentials, own logit", 2)):
            yield sender.row(
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


def _recomputed(sender: Sender) -> Recomputed:
    """Recomputation stops at the last tensor that a backward pass needs.

    Without dropout, that is the input of the last product; its sum is not repeated.
    """
    model = sender.run.Model
    if not model.use_recompute or model.recompute_granularity == "core_attn":
        return Recomputed()
    skipped = 0 if model.hidden_dropout_prob else 1
    lengths = [n for chunk in sender.chunks for n in _recompute_groups(sender, chunk.layers)]
    per_layer = 2 if model.recompute_granularity == "full" else 1
    return Recomputed(
        sum(per_layer * length - skipped for length in lengths), per_layer * sum(lengths)
    )


def _recompute_groups(sender: Sender, layers: Sequence[int]) -> Iterator[int]:
    """The numbers of layers that are recomputed together."""
    model, interval = sender.run.Model, 1
    if sender.layout.pp > 1 and model.recompute_granularity == "full":
        interval = sender.run.Distributed.pp_recompute_interval
    exempt = frozenset(model.no_recompute_layers)
    while layers:
        together = len(list(takewhile(lambda layer: layer not in exempt, layers[:interval])))
        if together:
            yield together
        layers = layers[max(1, together) :]


# Pipeline


def _pipeline(sender: Sender) -> Iterator[Row]:
    m, mp = sender.micro_batches, sender.layout.mp
    nbytes, part = sender.hidden_bytes, sender.hidden_bytes // mp
    if sender.run.Model.sequence_parallel:
        nbytes = part
    before = sum(not chunk.is_first for chunk in sender.chunks)
    behind = sum(not chunk.is_last for chunk in sender.chunks)
    for what, operation, when, chunks in (
        ("hidden states", "recv", FORWARD, before),
        ("hidden states", "send", FORWARD, behind),
        ("gradient of hidden states", "recv", BACKWARD, behind),
        ("gradient of hidden states", "send", BACKWARD, before),
    ):
        calls = m * chunks
        yield sender.row(
            what, operation, "pp", sender.dtype, nbytes, when, calls, part * calls, REPEATED
        )


# Sharding and data parallelism


def _elements(found: Iterable[Matrix]) -> int:
    return sum(matrix.rows * matrix.columns for matrix in found)


def _data_parallel(sender: Sender) -> Iterator[Row]:
    """The buckets: gradients in the reverse order of the parameters, up to a size."""
    if sender.layout.dp == 1:
        return
    limit = sender.run.Distributed.bucket_cap_mb * (1 << 20)
    sizes, size = list[int](), 0
    for matrix in reversed(all_matrices(sender)):
        size += FP32 * matrix.rows * matrix.columns
        if size >= limit:
            sizes, size = [*sizes, size], 0
    sizes += [size] if size else []
    for nbytes in dict.fromkeys(sizes):
        calls = sizes.count(nbytes)
        yield sender.row(
            "bucket of gradients", "all_reduce", "dp", "float32", nbytes, BACKWARD, calls
        )


def _sharding(sender: Sender) -> Iterator[Row]:
    layer = matrices(sender.run.Model, sender.layout.mp)
    gathered = _gathers(sender)
    for index, chunk in enumerate(sender.chunks):
        ends = [*embeddings(sender, chunk), *final_norm(sender, chunk)]
        yield from _sharded(sender, "layer", layer, len(chunk.layers), gathered[index])
        yield from _sharded(sender, "embeddings, final norm", ends, 1, gathered[index])


def _sharded(
    sender: Sender, what: str, found: list[Matrix], count: int, gathered: dict[str, int]
) -> Iterator[Row]:
    """What FSDP sends for `count` groups of parameters of the same size."""
    layout, stage = sender.layout, sender.run.Distributed.sharding.sharding_stage
    m, n, size = sender.micro_batches, layout.sharding, SIZES[sender.dtype]
    shard = sum(-(-matrix.rows // n) * matrix.columns for matrix in found)
    true_part = _elements(found) * (n - 1) // n  # that a rank has to send of it
    for when in (FORWARD, BACKWARD):
        calls = count * gathered[when]
        yield sender.row(
            f"parameters: {what}",
            "all_gather",
            "sharding",
            sender.dtype,
            n * shard * size,
            when,
            calls,
            true_part * size * calls,
            PADDED,
        )
    # A pipeline adds up whole gradients, in every stage.
    reduces = count * (m if stage > 1 and layout.pp == 1 else 1)
    yield sender.row(
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
        needed = on_the_wire("all_reduce", layout.dp, _elements(found) * FP32 // n * count)
        yield sender.row(
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


def _gathers(sender: Sender) -> dict[int, dict[str, int]]:
    """How often the passes of each chunk find its parameters sharded, and have to gather them."""
    keeps = sender.run.Distributed.sharding.sharding_stage < 3
    is_pipeline = sender.layout.pp > 1
    counts = {index: {FORWARD: 0, BACKWARD: 0} for index in range(len(sender.chunks))}
    present, order = set[int](), passes(sender)
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
    for index, _ in order[position:]:
        found.add(index)
        if len(found) == ACTIVE_CHUNKS:
            break
    return found


# Gradients that several ranks of a pipeline or an mp group have a part of


def _shared_gradients(sender: Sender) -> Iterator[Row]:
    layout, found = sender.layout, all_matrices(sender)
    if layout.mp > 1 and sender.run.Model.sequence_parallel:
        shared = [matrix for matrix in found if not matrix.is_split]
        nbytes = FP32 * _own_elements(sender, shared)
        positions = FP32 * _own_elements(sender, [x for x in shared if x.is_position])
        needed = on_the_wire("all_reduce", layout.mp, nbytes)
        needed -= on_the_wire("all_gather", layout.mp, positions)
        yield sender.row(
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
    if layout.pp > 1 and any(chunk.is_first or chunk.is_last for chunk in sender.chunks):
        embedding = [Matrix(sender.vocab_rows, sender.run.Model.hidden_size)]
        nbytes = FP32 * _own_elements(sender, embedding)
        yield sender.row(
            "gradient of the tied embedding", "all_reduce", "tied", "float32", nbytes, UPDATE, 1
        )


def _own_elements(sender: Sender, found: Iterable[Matrix]) -> int:
    """Elements of this rank's shards."""
    n, at = sender.layout.sharding, sender.layout.coordinates(sender.rank).sharding
    own = 0
    for matrix in found:
        length = -(-matrix.rows // n)
        own += matrix.columns * max(0, min(matrix.rows, (at + 1) * length) - at * length)
    return own
