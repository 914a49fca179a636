"""Estimates a run before it starts: parameters, FLOPs per token, and memory per rank.

The parameter count is exact. The bytes of parameters, gradients and optimizer state are exact in
fp32; the rest is approximate, see `assumptions`.
Sizes: s tokens, b samples per micro-batch, h hidden, a heads, f feed-forward, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.sections import Model, RunConfig
from trainer.layout import Layout, padded_vocab, segments

GIB = 1 << 30
GPU_CONTEXT = 1.5 * GIB  # CUDA context and communication buffers
FRAGMENTATION = 0.1  # of all other bytes: memory that the allocator holds but cannot use
UNKNOWN_VOCAB = 256  # for character vocabularies, which are counted later; a generous guess

# For a large vocabulary, the loss is computed for a chunk of tokens at a time. CHUNK_LOGITS limits
# the logits of a chunk; GPUs need large matrix products to be fast.
LARGE_VOCAB = 32_768
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}


class Memory(NamedTuple):
    """Bytes on one rank: persistent state, and memory that is needed temporarily."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float  # stage 3: the parameters of the layers in use, and the embeddings
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self)


class Estimate(NamedTuple):
    parameters: int
    flops_per_token: int
    memory: Memory  # of a rank in the pipeline stage that needs most memory


def estimate(run: RunConfig, layout: Layout) -> Estimate:
    heaviest = max(
        (stage_memory(run, layout, stage) for stage in range(layout.pp)),
        key=lambda memory: memory.total,
    )
    return Estimate(count_parameters(run.Model), flops_per_token(run), heaviest)


def assumptions(run: RunConfig, layout: Layout) -> list[str]:
    """What the estimate assumes about this run."""
    model, amp = run.Model, run.Engine.mix_precision
    level, stage = amp.enable and amp.level, run.Distributed.sharding.sharding_stage
    cases = [
        (True, "activations as in Korthikanti et al. 2022"),
        (not model.use_flash_attn and not model.use_recompute, "attention scores are stored"),
        (level == "O1", "O1 keeps fp32 state and half-precision copies of the weights"),
        (
            level == "O2",
            "O2 keeps half-precision parameters and gradients, and fp32 master weights",
        ),
        (
            layout.sharding > 1 and stage < 3,
            f"sharding stage {stage} keeps a rank's shard and the gathered parameters",
        ),
        (layout.sharding > 1 and stage == 3, "sharding stage 3 gathers two layers at a time"),
        (layout.pp > 1, "the pipeline stage that needs most memory counts"),
        (
            run.Global.device == "gpu",
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
        + model.num_layers * layer_parameters(model, 1)
        + 2 * h
    )


def layer_parameters(model: Model, mp: int) -> int:
    return sum(rows * columns for rows, columns in _layer_shapes(model, mp))


def _layer_shapes(model: Model, mp: int) -> list[tuple[int, int]]:
    """Parameter shapes of one block on one rank. mp splits no norms and no output biases."""
    h, f = model.hidden_size, model.ffn_hidden_size
    attention = [(3 * h // mp, h), (3 * h // mp, 1), (h, h // mp), (h, 1)]
    feed_forward = [(f // mp, h), (f // mp, 1), (h, f // mp), (h, 1)]
    return [*attention, *feed_forward, *[(h, 1)] * 4]


def flops_per_token(run: RunConfig) -> int:
    """FLOPs of forward and backward pass, without recomputation.

    6 per parameter except the position embeddings (a lookup), plus the attention scores.
    """
    model, seq_len = run.Model, run.Data.Train.dataset.max_seq_len
    weights = count_parameters(model) - model.max_position_embeddings * model.hidden_size
    return 6 * weights + 12 * model.num_layers * model.hidden_size * seq_len


def stage_memory(run: RunConfig, layout: Layout, stage: int) -> Memory:
    """The memory of a rank in one pipeline stage."""
    chunks = segments(run.Model.num_layers, layout.pp * run.Model.virtual_pp_degree)
    layers = [layer for chunk in chunks[stage :: layout.pp] for layer in chunk]
    states = _state_bytes(run, layout, stage, len(layers))
    activations = _activation_bytes(run, layout, stage, layers)
    overhead = 0.0
    if run.Global.device == "gpu":
        overhead = GPU_CONTEXT + FRAGMENTATION * (sum(states) + activations)
    return Memory(*states, activations, overhead)


def _vocab(model: Model) -> int:
    return padded_vocab(model.vocab_size or UNKNOWN_VOCAB, model.vocab_size_divisible_unit)


def _end_shapes(model: Model, layout: Layout, stage: int) -> list[tuple[int, int]]:
    """Shapes outside the layers: embeddings and final norm.

    The last stage holds its own copy of the tied embedding.
    """
    h, shapes = model.hidden_size, []
    if stage in (0, layout.pp - 1):
        shapes.append((_vocab(model) // layout.mp, h))
    if stage == 0:
        shapes.append((model.max_position_embeddings, h))
    if stage == layout.pp - 1:
        shapes += [(h, 1)] * 2
    return shapes


def _state_bytes(
    run: RunConfig, layout: Layout, stage: int, num_layers: int
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients and optimizer state, and of temporarily gathered layers."""
    amp, sharding = run.Engine.mix_precision, run.Distributed.sharding
    # Bytes per parameter: `kept` between updates, `used` during the forward and backward pass.
    kept, used, per_gradient, per_moment = (4, 4, 4, 8)
    if amp.enable:
        kept, used, per_gradient, per_moment = (2, 2, 2, 12) if amp.level == "O2" else (4, 6, 4, 8)
    ends, layer = _end_shapes(run.Model, layout, stage), _layer_shapes(run.Model, layout.mp)
    shapes = [*ends, *layer * num_layers]
    whole, own = _elements(shapes), _elements(shapes, layout.sharding)
    if layout.sharding == 1:
        return whole * used, whole * per_gradient, whole * per_moment, 0
    # FSDP keeps unreduced gradients until the end of the update in these two cases. A pipeline
    # reduces them after its last micro-batch, even if that is the only one.
    accumulates = layout.pp > 1 or (
        run.Engine.accumulate_steps > 1 and sharding.sharding_stage == 1
    )
    gradients = (whole if accumulates else own) * per_gradient
    gathered, passing = (
        (0, _elements([*ends, *layer * 2]) * used)
        if sharding.sharding_stage == 3
        else (whole * used, 0)
    )
    if sharding.sharding_offload and run.Global.device == "gpu":
        return gathered, gradients if accumulates else 0, 0, passing
    return own * kept + gathered, gradients, own * per_moment, passing


def _elements(shapes: list[tuple[int, int]], parts: int = 1) -> int:
    """Elements on the rank with most rows, if rows are split into `parts`."""
    return sum(-(-rows // parts) * columns for rows, columns in shapes)


def _activation_bytes(run: RunConfig, layout: Layout, stage: int, layers: Sequence[int]) -> float:
    sizes = _layer_activations(run, layout)
    exempt = frozenset(run.Model.no_recompute_layers)
    kept = sum(_kept(run, layout, sizes, layer in exempt) for layer in layers)
    schedule = run.Distributed.pp_schedule
    alive = _chunks_alive(
        layout, run.Model.virtual_pp_degree, stage, run.Engine.accumulate_steps, schedule
    )
    share = alive / run.Model.virtual_pp_degree  # `kept` covers all chunks of the stage
    return kept * share + _working_set(run, layout, sizes) + _logits(run, layout, stage)


def _chunks_alive(
    layout: Layout, virtual_pp: int, stage: int, accumulate: int, schedule: str
) -> int:
    """The maximum number of chunks whose activations a stage holds for their backward passes."""
    if layout.pp == 1:
        return virtual_pp
    if schedule == "GPipe" and virtual_pp == 1:
        return accumulate
    ahead = layout.pp - stage  # 1F1B: earlier stages run more forward passes before a backward
    if virtual_pp > 1:
        ahead = 2 * (layout.pp - stage - 1) + (virtual_pp - 1) * layout.pp + 1
    return min(ahead, accumulate * virtual_pp)


class _LayerActivations(NamedTuple):
    """Bytes that one layer stores per micro-batch, grouped by what recomputation can drop."""

    layer_input: float
    attention: float  # queries, keys, values, and the input of the output projection
    scores: float
    rest: float

    @property
    def total(self) -> float:
        return self.layer_input + self.attention + self.scores + self.rest


def _layer_activations(run: RunConfig, layout: Layout) -> _LayerActivations:
    model = run.Model
    s, b = run.Data.Train.dataset.max_seq_len, run.Global.micro_batch_size
    h, mp = model.hidden_size, layout.mp
    size = 2 if run.Engine.mix_precision.enable else 4
    whole = mp if model.sequence_parallel else 1  # tensor parallelism alone does not split these
    masks = 2 if model.hidden_dropout_prob else 0  # two dropout masks, one byte per element
    rest = s * b * h * (3 * size + masks) / whole + s * b * 2 * model.ffn_hidden_size * size / mp
    scores = 0.0
    if not model.use_flash_attn:
        per_score = 2 * size + 1 if model.attention_probs_dropout_prob else size
        scores = model.num_attention_heads * s * s * b * per_score / mp
    return _LayerActivations(s * b * h * size / whole, 4 * s * b * h * size / mp, scores, rest)


def _kept(run: RunConfig, layout: Layout, sizes: _LayerActivations, is_exempt: bool) -> float:
    model = run.Model
    if not model.use_recompute or is_exempt:
        return sizes.total
    if model.recompute_granularity == "full":
        together = run.Distributed.pp_recompute_interval if layout.pp > 1 else 1
        return sizes.layer_input / together  # only the first layer of a group keeps its input
    if model.recompute_granularity == "full_attn":
        return sizes.layer_input + sizes.rest
    return sizes.total - sizes.scores


def _working_set(run: RunConfig, layout: Layout, sizes: _LayerActivations) -> float:
    """Bytes that a recomputed layer needs again during its backward pass."""
    if not run.Model.use_recompute:
        return 0.0
    dropped = {
        "full": sizes.total,
        "full_attn": sizes.attention + sizes.scores,
        "core_attn": sizes.scores,
    }
    together = run.Distributed.pp_recompute_interval if layout.pp > 1 else 1
    return dropped[run.Model.recompute_granularity] * together


def _logits(run: RunConfig, layout: Layout, stage: int) -> float:
    """Logits and their gradient on the last stage.

    Of all tokens, or of one chunk plus the fp32 gradient of the embedding.
    """
    if stage != layout.pp - 1:
        return 0.0
    # fp32 logits and gradient; mixed precision has half-precision logits too.
    per_logit = 10 if run.Engine.mix_precision.enable else 8
    rows = _vocab(run.Model) / layout.mp
    logits = run.Data.Train.dataset.max_seq_len * run.Global.micro_batch_size * rows
    chunk = CHUNK_LOGITS["cuda" if run.Global.device == "gpu" else "cpu"]
    if (rows >= LARGE_VOCAB or layout.mp > 1) and logits > chunk:
        return chunk * per_logit + rows * run.Model.hidden_size * 4
    return logits * per_logit
