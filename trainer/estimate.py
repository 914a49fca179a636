"""Estimates a run before it starts: parameters, FLOPs per token, and memory per rank.

The parameter count is exact, and so are the bytes of parameters, gradients and optimizer state
(`state_bytes`). The peak of an update (`trainer/memory.py`) is within 2 % of counted bytes; the
overhead on GPUs is a guess, see `assumptions`.
Sizes: s tokens, b samples per micro-batch, h hidden, a heads, f feed-forward, V padded vocabulary.
"""

from __future__ import annotations

from trainer.config.sections import Model, RunConfig
from trainer.layout import UNKNOWN_VOCAB, Coordinates, Layout, segments
from trainer.memory import peak_memory
from trainer.named_tuple import NamedTuple
from trainer.rank_plan import RankPlan, all_matrices, elements, matrices, shard_elements
from trainer.tape import ElementBytes

GIB = 1 << 30
GB = 10**9  # as GPUs are sold: one of 40 GB has 39.49 GiB
GPU_CONTEXT = 1.5 * GIB  # CUDA context and communication buffers
FRAGMENTATION = 0.1  # of all other bytes: memory that the allocator holds but cannot use
PASSES = {"forward": " pass", "backward": " pass"}


class Memory(NamedTuple):
    """Bytes on one rank at the moment of an update that needs most of them."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float  # whole parameters of sharded layers; in O1, half-precision copies of weights
    activations: float  # kept from the forward to the backward pass
    temporary: float  # results of the operation at work, and buffers
    overhead: float
    phase: str = ""  # forward, backward or update
    stage: int = 0  # of the pipeline

    @property
    def parts(self) -> dict[str, float]:
        return dict(zip(self._fields, self[:7]))

    @property
    def total(self) -> float:
        return sum(self[:7])


class Estimate(NamedTuple):
    parameters: int
    flops_per_token: int
    memory: Memory  # of a rank in the pipeline stage that needs most memory


def estimate(run: RunConfig, layout: Layout) -> Estimate:
    heaviest = max(
        (stage_memory(run, layout, stage) for stage in _different_stages(run, layout)),
        key=lambda memory: memory.total,
    )
    return Estimate(count_parameters(run.Model), flops_per_token(run), heaviest)


def _different_stages(run: RunConfig, layout: Layout) -> list[int]:
    """Of stages with equal layers, the first: it has most micro-batches in flight."""
    chunks = segments(run.Model.num_layers, layout.pp * run.Model.virtual_pp_degree)
    exempt, found = frozenset(run.Model.no_recompute_layers), dict[object, int]()
    for stage in range(layout.pp):
        layers = [
            (len(chunk), len(exempt.intersection(chunk))) for chunk in chunks[stage :: layout.pp]
        ]
        found.setdefault((stage == 0, stage == layout.pp - 1, tuple(layers)), stage)
    return list(found.values())


def assumptions(run: RunConfig, layout: Layout) -> list[str]:
    """What the estimate assumes about this run."""
    amp, stage = run.Engine.mix_precision, run.Distributed.sharding.sharding_stage
    level = amp.enable and amp.level
    peak = estimate(run, layout).memory
    where = f" of pipeline stage {peak.stage + 1}" if layout.pp > 1 else ""
    cases = [
        (True, f"the peak is in the {peak.phase}{PASSES.get(peak.phase, '')}{where}"),
        (True, "layers are not compiled; attention keeps no scores"),
        (
            level == "O1" and layout.sharding == 1,
            "O1 keeps fp32 state and half-precision copies of the weights",
        ),
        (
            level == "O2" and layout.sharding == 1,
            "O2 keeps half-precision parameters, and fp32 gradients and master weights",
        ),
        (
            bool(level) and layout.sharding > 1,
            "sharded parameters and gradients are fp32, gathered parameters half precision",
        ),
        (
            layout.sharding > 1 and stage < 3,
            f"sharding stage {stage} keeps a rank's shard and the gathered parameters",
        ),
        (layout.sharding > 1 and stage == 3, "sharding stage 3 gathers two layers at a time"),
        (
            on_gpu(run),
            "1.5 GiB for CUDA context and communication buffers, and 10 % for fragmentation",
        ),
    ]
    return [text for applies, text in cases if applies]


def count_parameters(model: Model) -> int:
    """The exact number. The tied embedding counts once, without padding."""
    h = model.hidden_size
    vocab = model.vocab_size or UNKNOWN_VOCAB
    return (
        (vocab + model.max_position_embeddings) * h
        + model.num_layers * layer_parameters(model)
        + 2 * h
    )


def layer_parameters(model: Model) -> int:
    return elements(matrices(model, 1))


def flops_per_token(run: RunConfig) -> int:
    """FLOPs of forward and backward pass, without recomputation.

    6 per parameter except the position embeddings (a lookup), plus the attention scores.
    """
    model, seq_len = run.Model, run.Data.Train.dataset.max_seq_len
    weights = count_parameters(model) - model.max_position_embeddings * model.hidden_size
    return 6 * weights + 12 * model.num_layers * model.hidden_size * seq_len


def stage_memory(run: RunConfig, layout: Layout, stage: int) -> Memory:
    """The memory of a rank in one pipeline stage, at its peak."""
    peak = peak_memory(run, layout, _first_rank(layout, stage))
    if layout.sharding > 1 and run.Distributed.sharding.sharding_offload and on_gpu(run):
        states = state_bytes(run, layout, stage)
        kept = peak.gradients if peak.gradients > states.own_gradients else 0.0
        peak = peak._replace(parameters=0.0, optimizer=0.0, gradients=kept)
    overhead = GPU_CONTEXT + FRAGMENTATION * peak.total if on_gpu(run) else 0.0
    return Memory(*peak[:6], overhead, phase=peak.phase, stage=stage)


def on_gpu(run: RunConfig) -> bool:
    return run.Global.device == "gpu"


class States(NamedTuple):
    """Bytes of a stage's training state, on the rank that holds most of it."""

    parameters: float  # with those that sharding stages 1 and 2 gather
    gradients: float  # the most between two backward passes
    optimizer: float
    own_gradients: float  # after the last backward pass


def state_bytes(run: RunConfig, layout: Layout, stage: int) -> States:
    """Exact in every precision, except for the copies of weights that O1 keeps for a while."""
    sizes, sharding = ElementBytes.of(run, layout), run.Distributed.sharding
    held = all_matrices(RankPlan(run, layout, _first_rank(layout, stage)))
    whole, own = elements(held), shard_elements(held, layout.sharding)
    if layout.sharding == 1:
        return States(whole * sizes.parameter, whole * 4, whole * sizes.optimizer, whole * 4)
    # FSDP keeps unreduced gradients until the end of the update in these two cases. A pipeline
    # reduces them after its last micro-batch, even if that is the only one.
    accumulates = layout.pp > 1 or (
        (run.Engine.accumulate_steps or 1) > 1 and sharding.sharding_stage == 1
    )
    gathered = whole * sizes.used if sharding.sharding_stage < 3 else 0
    gradients = (whole if accumulates else own) * 4
    return States(own * sizes.parameter + gathered, gradients, own * sizes.optimizer, own * 4)


def _first_rank(layout: Layout, stage: int) -> int:
    """A rank of a pipeline stage that holds at least as much as any other."""
    return layout.rank(Coordinates(0, stage, 0, 0))
