"""The rules of layouts and batch sizes: what is refused, with which words, and what fits instead.

gptctl and the trainer share these rules. Plain integers in, findings out. Of configs, this module
knows only the names of keys, for its findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from trainer.errors import Finding, Rule, one_of
from trainer.layout import (
    AXES,
    DEGREE_KEYS,
    Batch,
    Layout,
    Machines,
    Shape,
    divisors,
    factorings,
    padded_vocab,
    segments,
)

MAX_TRIED = 500  # 720,720 GPUs have 89,600 layouts, and checking one takes 0.3 ms
NUM_PROPOSED = 3  # layouts or sizes in a hint

# The keys that rules depend on, see `Rule.uses`.
_DEGREES = tuple(DEGREE_KEYS.values())
MACHINE_KEYS = ("Launch.nodes", "Launch.gpus_per_node", "Launch.devices", "Launch.cluster")
_BATCH = (
    "Global.global_batch_size",
    "Global.local_batch_size",
    "Global.micro_batch_size",
    DEGREE_KEYS["dp"],
    DEGREE_KEYS["sharding"],
)
_MP = ("Model.name", "Distributed.mp_degree")
_PP = ("Model.name", "Model.num_layers", "Model.virtual_pp_degree", "Distributed.pp_degree")

WORLD = Rule(
    "L001",
    "mp_degree × sharding_degree × pp_degree × dp_degree must be the number of GPUs",
    uses=(*_DEGREES, *MACHINE_KEYS),
)
# Tensor parallelism splits attention between heads, so each rank needs the same number of them.
HEADS = Rule(
    "L002",
    "num_attention_heads must be divisible by mp_degree",
    uses=("Model.num_attention_heads", *_MP),
)
HIDDEN = Rule(
    "L003",
    "hidden_size must be divisible by num_attention_heads",
    uses=("Model.hidden_size", "Model.num_attention_heads", "Model.name"),
)
# The embedding is split by rows of the vocabulary, the feed-forward layer by columns.
VOCAB = Rule(
    "L004",
    "the padded vocabulary must be divisible by mp_degree",
    uses=("Model.vocab_size", "Model.vocab_size_divisible_unit", "Data.Train.dataset.name", *_MP),
)
FFN = Rule(
    "L005",
    "ffn_hidden_size must be divisible by mp_degree",
    uses=("Model.ffn_hidden_size", "Model.hidden_size", *_MP),
)
LAYERS = Rule("L006", "every pipeline chunk must have at least one layer", uses=_PP)
# As in FleetX: the interleaved schedule needs equal chunks, and full rounds of micro-batches.
INTERLEAVED = Rule(
    "L007",
    "virtual_pp_degree > 1: num_layers must be divisible by pp_degree × virtual_pp_degree, and "
    "accumulate_steps by pp_degree",
    uses=(*_PP, *_BATCH),
)
# 1F1B needs a micro-batch for every stage before the first backward pass.
_MICRO_BATCHES = (
    "Distributed.pp_degree",
    "Distributed.pp_schedule",
    "Model.virtual_pp_degree",
    *_BATCH,
)
MICRO_BATCHES = Rule(
    "L008",
    "an update must have at least pp_degree micro-batches if pp_schedule is set to 1F1B or "
    "virtual_pp_degree > 1",
    uses=_MICRO_BATCHES,
)
SEQUENCE = Rule(
    "L009",
    "max_seq_len must be divisible by mp_degree if sequence_parallel is on",
    uses=("Data.Train.dataset.max_seq_len", "Model.sequence_parallel", "Distributed.mp_degree"),
)
# Tensor parallelism communicates in every layer, which only links inside a node do fast.
MP_IN_NODE = Rule(
    "L010",
    "an mp group should fit into one node",
    "warning",
    uses=("Distributed.mp_degree", *MACHINE_KEYS),
)
UNEVEN = Rule("L011", "pipeline stages should have the same number of layers", "warning", uses=_PP)
# A warning, because FleetX's own benchmarks run a pipeline of two stages with one micro-batch.
FEW_MICRO_BATCHES = Rule(
    "L012", "an update should have at least pp_degree micro-batches", "warning", uses=_MICRO_BATCHES
)

GLOBAL_BATCH = Rule(
    "B001",
    "global_batch_size must be local_batch_size × dp_degree × sharding_degree",
    uses=_BATCH,
)
MICRO = Rule("B002", "local_batch_size must be divisible by micro_batch_size", uses=_BATCH)


def check_world(
    layout: Layout, machines: Machines | None, dp_written: bool, unit: str = "GPUs"
) -> Iterator[Finding]:
    if machines is None or layout.world == machines.world:
        return
    nodes = "1 node" if machines.nodes == 1 else f"{machines.nodes} nodes"
    there = f"{nodes} × {machines.per_node} = {machines.world} {unit}"
    factors = f"mp_degree {layout.mp} × sharding_degree {layout.sharding} × pp_degree {layout.pp}"
    if dp_written:
        message = f"{factors} × dp_degree {layout.dp} = {layout.world}, but {there}"
    else:
        rest = layout.mp * layout.sharding * layout.pp
        message = f"{factors} = {rest} does not divide {there}, so no dp_degree fits"
    # Report at the key that most likely needs a change: dp if written, else the largest degree.
    largest = max(("mp", "sharding", "pp"), key=lambda axis: int(getattr(layout, axis)))
    yield WORLD.found(DEGREE_KEYS["dp" if dp_written else largest], layout.world, message)


def check_mp_in_node(layout: Layout, machines: Machines | None) -> Iterator[Finding]:
    if machines and machines.per_node % layout.mp:
        message = (
            f"mp groups of {layout.mp} ranks do not fit into nodes of {machines.per_node}: "
            "tensor parallelism would communicate between nodes, which is slow"
        )
        fitting = f"a divisor of {machines.per_node}" if machines.per_node > 1 else "mp_degree 1"
        hint = f"use {fitting}; to split the model between nodes, use pp_degree"
        yield MP_IN_NODE.found(DEGREE_KEYS["mp"], layout.mp, message, hint)


def solve_batch(
    global_size: int | None, local: int | None, micro: int, replicas: int
) -> tuple[Batch, list[Finding]]:
    """Derive the missing batch sizes. Findings for broken rules suggest sizes that fit."""
    given = local
    if local is None:
        local = micro if global_size is None else max(1, global_size // replicas)
    if global_size is None:
        global_size = local * replicas
    found = []
    shared = global_size == local * replicas
    if not shared:
        found.append(_global_mismatch(global_size, given, micro, replicas))
    # If local was derived from a global size that does not fit, the first finding is enough.
    if local % micro and (shared or given is not None):
        found.append(_micro_mismatch(given, local, micro, replicas))
    return Batch(global_size, local, micro), found


def _global_mismatch(global_size: int, local: int | None, micro: int, replicas: int) -> Finding:
    if local is None:
        step = micro * replicas  # every global batch size that fits is a multiple of this
        below, above = global_size // step * step, -(-global_size // step) * step
        message = (
            f"{global_size} samples cannot be divided evenly among "
            f"dp_degree × sharding_degree = {replicas} replicas"
        )
        hint = f"use {one_of([size for size in dict.fromkeys((below, above)) if size])}"
    else:
        product = local * replicas
        message = (
            f"{global_size} is not local_batch_size {local} × "
            f"dp_degree × sharding_degree {replicas} = {product}"
        )
        hint = f"use {product}"
        if global_size % (replicas * micro) == 0:
            hint += f", or local_batch_size {global_size // replicas}"
    return GLOBAL_BATCH.found("Global.global_batch_size", global_size, message, hint)


def _micro_mismatch(given: int | None, local: int, micro: int, replicas: int) -> Finding:
    near = nearest_divisors(local, micro)
    if given is None:
        message = (
            f"global_batch_size / {replicas} = {local} is not a multiple of "
            f"micro_batch_size {micro}"
        )
        size, step = local * replicas, micro * replicas
        below, above = size // step * step, -(-size // step) * step
        sizes = [size for size in dict.fromkeys((below, above)) if size]
        hint = f"use micro_batch_size {one_of(near)}, or global_batch_size {one_of(sizes)}"
        return MICRO.found("Global.micro_batch_size", micro, message, hint)
    message = f"{local} samples per replica is not a multiple of micro_batch_size {micro}"
    return MICRO.found(
        "Global.local_batch_size", local, message, f"use micro_batch_size {one_of(near)}"
    )


def check_model(shape: Shape, layout: Layout, batch: Batch) -> Iterator[Finding]:
    """Check whether the model can be split this way."""
    yield from _check_tensor_split(shape, layout.mp)
    yield from _check_pipeline(shape, layout.pp, batch, layout.data_ranks)
    if shape.hidden % shape.heads:
        message = f"hidden_size {shape.hidden} is not a multiple of {shape.heads} attention heads"
        near = one_of(nearest_divisors(shape.hidden, shape.heads))
        yield HIDDEN.found("Model.num_attention_heads", shape.heads, message, f"use {near} heads")


def _check_tensor_split(shape: Shape, mp: int) -> Iterator[Finding]:
    """At most one finding about sizes: the degrees in its hint divide all of them."""
    # A vocabulary that is counted later is padded to the unit: only divisors of that surely work.
    vocab = padded_vocab(shape.vocab, shape.vocab_unit) if shape.vocab else shape.vocab_unit
    fitting = [
        degree
        for degree in divisors(shape.heads)
        if shape.ffn % degree == 0 and vocab % degree == 0
    ]
    key, hint = DEGREE_KEYS["mp"], f"use {one_of(fitting)}"
    if shape.heads % mp:
        yield HEADS.found(
            key, mp, f"{shape.heads} attention heads cannot be split over mp_degree {mp}", hint
        )
    elif shape.ffn % mp:
        yield FFN.found(
            key, mp, f"ffn_hidden_size {shape.ffn} cannot be split over mp_degree {mp}", hint
        )
    elif vocab % mp:
        what = (
            f"a vocabulary of {shape.vocab}, padded to {vocab},"
            if shape.vocab
            else f"vocab_size_divisible_unit {vocab}"
        )
        unit = f"Model.vocab_size_divisible_unit: {math.lcm(shape.vocab_unit, mp)}"
        yield VOCAB.found(
            key, mp, f"{what} cannot be split over mp_degree {mp}", f"{hint}, or set {unit}"
        )
    if shape.sequence_parallel and mp > 1 and shape.seq_len % mp:
        message = f"sequences of {shape.seq_len} tokens cannot be split over mp_degree {mp}"
        yield SEQUENCE.found(
            key, mp, message, f"use a divisor of {shape.seq_len}, or sequence_parallel: False"
        )


def _check_pipeline(shape: Shape, pp: int, batch: Batch, replicas: int) -> Iterator[Finding]:
    if pp == 1:
        return
    accumulate = batch.accumulate
    key, chunks = DEGREE_KEYS["pp"], pp * shape.virtual_pp
    if shape.layers < chunks:
        message = f"{shape.layers} layers cannot fill {chunks} pipeline chunks"
        hint = f"use pp_degree {max(1, shape.layers // shape.virtual_pp)} or less"
        if shape.virtual_pp > 1 and pp <= shape.layers:
            hint = f"use virtual_pp_degree {shape.layers // pp} or less"
        yield LAYERS.found(key, pp, message, hint)
    elif shape.virtual_pp > 1 and shape.layers % chunks:
        message = f"{shape.layers} layers cannot be split into {chunks} equal chunks"
        yield INTERLEAVED.using(*_PP).found(
            "Model.virtual_pp_degree", shape.virtual_pp, message, "use 1"
        )
    elif shape.virtual_pp > 1 and accumulate % pp:
        message = f"{accumulate} micro-batches per update is not a multiple of {pp} stages"
        yield INTERLEAVED.found("Model.virtual_pp_degree", shape.virtual_pp, message, "use 1")
    elif shape.layers % pp:  # works, but wastes time: a warning
        sizes = sorted({len(part) for part in segments(shape.layers, pp)})
        message = (
            f"{shape.layers} layers on {pp} stages give {one_of(sizes)} layers per stage: "
            "the shorter stages wait for the longest"
        )
        yield UNEVEN.found(key, pp, message, f"use a divisor of {shape.layers}")
    if 0 < accumulate < pp:  # 0: B002 reports sizes that do not divide
        yield _few_micro_batches(shape, pp, batch, replicas)


def _few_micro_batches(shape: Shape, pp: int, batch: Batch, replicas: int) -> Finding:
    count = "1 micro-batch" if batch.accumulate == 1 else f"{batch.accumulate} micro-batches"
    message = f"{count} per update cannot fill {pp} pipeline stages"
    local = pp * batch.micro
    hint = f"raise local_batch_size to {local} (global_batch_size to {local * replicas}) or more"
    if near := [size for size in divisors(batch.local) if batch.local // size >= pp]:
        hint += f", or lower micro_batch_size to {near[-1]}"
    if shape.virtual_pp == 1 and shape.pp_schedule == "GPipe":
        idle = (pp - 1) / (batch.accumulate + pp - 1)
        message += f": runs with GPipe, and stages are idle for {idle:.0%} of the time"
        return FEW_MICRO_BATCHES.found(DEGREE_KEYS["pp"], pp, message, hint)
    if shape.virtual_pp == 1:
        hint += ", or leave pp_schedule empty"
    return MICRO_BATCHES.found(DEGREE_KEYS["pp"], pp, message, hint)


def propose(
    wish: Layout,
    machines: Machines,
    dp_written: bool,
    fits: Callable[[Layout], bool],
) -> list[Layout]:
    """The fitting layouts most similar to `wish`, preferably with mp groups inside one node."""
    # Changing dp costs least (it changes only the batch), changing mp most.
    prices = {"dp": 1.0 if dp_written else 0.0, "sharding": 1.2, "pp": 2.0, "mp": 2.5}

    def distance(layout: Layout) -> tuple[bool, float]:
        # On a logarithmic scale: doubling a degree is as far as halving it.
        changes = zip(AXES, layout, wish)
        price = sum(
            prices[axis] * abs(math.log2(degree / wanted)) for axis, degree, wanted in changes
        )
        return machines.per_node % layout.mp > 0, price

    nearest = sorted(factorings(machines.world), key=distance)[:MAX_TRIED]
    tried = [*nearest, Layout(dp=machines.world)]  # pure data parallelism fits every model
    return list(islice(filter(fits, dict.fromkeys(tried)), NUM_PROPOSED))


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The divisors nearest to `wish`, in ascending order."""
    return sorted(sorted(divisors(number), key=lambda divisor: abs(divisor - wish))[:NUM_PROPOSED])
