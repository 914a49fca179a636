"""Rules for a whole run config, except the layout rules in `layout.py`.

They report contradictions, settings without effect, and settings that are probably a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.schedule_rules import check_schedule
from trainer.config.sections import Dataset, RunConfig
from trainer.errors import Finding, Rule, one_of
from trainer.layout import DEGREE_KEYS, segments

_LAYERS = ("Model.name", "Model.num_layers")
MP, PP = DEGREE_KEYS["mp"], DEGREE_KEYS["pp"]
_SHARDING = ("Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage")

# Learned position embeddings are a table: longer samples would have no entry in it.
POSITIONS = Rule("T001", "max_seq_len must not be greater than max_position_embeddings")
NO_RECOMPUTE = Rule(
    "T002",
    "no_recompute_layers must contain valid layer numbers",
    uses=("Model.no_recompute_layers", *_LAYERS),
)
INTERVAL = Rule(
    "T003",
    "pp_recompute_interval must not be greater than the number of layers per pipeline chunk",
    uses=(
        "Distributed.pp_recompute_interval",
        "Distributed.pp_degree",
        "Model.virtual_pp_degree",
        *_LAYERS,
    ),
)
# Stage 0 switches sharding off: with a degree above 1, it is unclear which of the two is meant.
STAGE = Rule("T004", "sharding_stage must be 1, 2 or 3 if sharding_degree > 1", uses=_SHARDING)
BACKEND = Rule(
    "T005",
    "backend must not be nccl if device is cpu",
    uses=("Global.device", "Distributed.backend"),
)
CHAR_PATH = Rule("T006", "a CharDataset must have a path")
SPLIT = Rule("T007", "split must leave documents to train on", uses=("Data.Train.dataset.split",))
PROFILE_STEPS = Rule(
    "T008",
    "Profiler.scheduler must be [first step, last step + 1], counted from 1",
    uses=("Profiler.scheduler",),
)
# A warning, because training works without a profile.
PROFILE_LENGTH = Rule(
    "T029",
    "the steps to profile should be within the run",
    "warning",
    uses=("Profiler.enable", "Profiler.scheduler", "Engine.run_mode", "Engine.max_steps"),
)
DECODE = Rule(
    "T009",
    "min_dec_len must not be greater than max_dec_len",
    uses=("Generation.min_dec_len", "Generation.max_dec_len"),
)
STEPS = Rule(
    "T010",
    "max_steps must be greater than 0 if run_mode is set to step",
    uses=("Engine.run_mode", "Engine.max_steps"),
)
# A warning, because FleetX too accepts such settings and switches them off.
NO_EFFECT = Rule("T021", "a setting should have an effect in this layout", "warning")
# A warning, because training works without evaluation.
NO_EVALUATION = Rule(
    "T026",
    "split should leave documents to evaluate on",
    "warning",
    uses=("Data.Eval.dataset.split", "Data.Train.dataset.split", "Engine.eval_freq"),
)
GLOO_ON_GPU = Rule(
    "T022",
    "GPUs should use backend nccl",
    "warning",
    uses=("Global.device", "Distributed.backend"),
)
# Each chunk adds messages between stages; FleetX warns above 2 as well.
MANY_CHUNKS = Rule(
    "T023", "virtual_pp_degree should be 1 or 2", "warning", uses=("Model.virtual_pp_degree",)
)

# Notices: the config is valid, but the user may expect an effect that never comes.
ALWAYS = Rule("N004", "a setting should have an effect in this trainer", "notice")
ON_THE_CPU = Rule(
    "N005",
    "sharding_offload should be used with GPUs",
    "notice",
    uses=(
        "Distributed.sharding.sharding_offload",
        "Distributed.sharding.sharding_degree",
        "Global.device",
    ),
)
LENGTHS = Rule(
    "T012",
    "Eval and Test must have the max_seq_len of Train if pp_degree > 1 or sequence_parallel is on",
)
EOS = Rule("T013", "eos_id must be a token id of the vocabulary, or -1")
SNAPSHOT = Rule(
    "T011",
    "snapshot_path must be empty if the model is split over ranks",
    uses=("Engine.save_load.snapshot_path", MP, PP, DEGREE_KEYS["sharding"]),
)

# The neutral value of settings that are not booleans, used to replace them if they have no effect.
OFF: dict[str, Any] = {"Model.virtual_pp_degree": 1, "Distributed.pp_schedule": "1F1B"}


def check_run(run: RunConfig) -> Iterator[Finding]:
    yield from _check_data(run)
    yield from _check_recompute(run)
    yield from _check_distributed(run)
    yield from _check_engine(run)
    yield from check_schedule(run)
    yield from _check_profiler(run)
    yield from _check_other_sections(run)
    yield from _without_effect(run)
    yield from _done_anyway(run)


def _check_data(run: RunConfig) -> Iterator[Finding]:
    seen: list[Dataset] = []
    for part in ("Train", "Eval", "Test"):
        dataset = getattr(run.Data, part).dataset
        if dataset not in seen:  # Eval and Test inherit from Train: report a mistake only once
            yield from _check_dataset(
                dataset, f"Data.{part}.dataset", run.Model.max_position_embeddings
            )
            yield from _check_eos(dataset, part, run.Model.vocab_size)
        seen.append(dataset)
    yield from _check_lengths(run)
    yield from _check_split(run)


def _check_lengths(run: RunConfig) -> Iterator[Finding]:
    """Pipeline stages and sequence shards fix their tensor shapes before the first step."""
    wanted = run.Data.Train.dataset.max_seq_len
    has_fixed_shapes = run.Distributed.pp_degree > 1 or run.Model.sequence_parallel
    for part in ("Eval", "Test") if has_fixed_shapes else ():
        length = getattr(run.Data, part).dataset.max_seq_len
        path = f"Data.{part}.dataset.max_seq_len"
        if length != wanted:
            rule = LENGTHS.using(
                path, "Data.Train.dataset.max_seq_len", PP, "Model.sequence_parallel"
            )
            yield rule.found(
                path,
                length,
                f"{length} tokens per sample, but Train has {wanted}",
                f"use {wanted}, or leave it empty",
            )


def _check_split(run: RunConfig) -> Iterator[Finding]:
    train, evaluation = run.Data.Train.dataset, run.Data.Eval.dataset
    hint = "write proportions such as [949, 50, 1]"
    if train.name == "GPTDataset" and not any(train.split[:1]):
        message = f"{list(train.split)} leaves nothing to train on"
        yield SPLIT.found("Data.Train.dataset.split", list(train.split), message, hint)
    # Only if there is something to train on: otherwise it is the same mistake twice.
    elif (
        evaluation.name == "GPTDataset"
        and run.Engine.eval_freq > 0
        and not any(evaluation.split[1:2])
    ):
        message = f"{list(evaluation.split)} leaves nothing to evaluate on"
        yield NO_EVALUATION.found(
            "Data.Eval.dataset.split",
            list(evaluation.split),
            message,
            f"{hint}, or set Engine.eval_freq: 0",
        )


def _check_dataset(dataset: Dataset, path: str, positions: int) -> Iterator[Finding]:
    if dataset.max_seq_len > positions:
        message = (
            f"{dataset.max_seq_len} tokens per sample, but the model has only {positions} positions"
        )
        hint = (
            f"set Model.max_position_embeddings: {dataset.max_seq_len}, or "
            f"use max_seq_len {positions} or less"
        )
        rule = POSITIONS.using(f"{path}.max_seq_len", "Model.max_position_embeddings", "Model.name")
        yield rule.found(f"{path}.max_seq_len", dataset.max_seq_len, message, hint)
    if dataset.name == "CharDataset" and not dataset.path:
        rule = CHAR_PATH.using(f"{path}.path", f"{path}.name")
        yield rule.found(
            f"{path}.path", None, "missing", "write the path of a text, or builtin (demo corpus)"
        )


def _check_eos(dataset: Dataset, part: str, vocab_size: int | None) -> Iterator[Finding]:
    token, path = dataset.eos_id, f"Data.{part}.dataset"
    rule = EOS.using(f"{path}.eos_id", f"{path}.name", "Model.vocab_size", "Model.name")
    if token is None or token < 0:
        return
    if dataset.name == "CharDataset":
        if part == "Train":  # Eval and Test may only have inherited it
            message = "the characters of a CharDataset have no end-of-document token"
            yield rule.found(f"{path}.eos_id", token, message, "leave it empty")
    elif vocab_size is not None and token >= vocab_size:
        message = f"token {token} is outside the vocabulary of {vocab_size}"
        hint = f"use the end-of-document token of your tokenizer, at most {vocab_size - 1}, or -1"
        yield rule.found(f"{path}.eos_id", token, message, hint)


def _check_recompute(run: RunConfig) -> Iterator[Finding]:
    model, distributed = run.Model, run.Distributed
    # Negative numbers cannot occur: the type of the key already refuses them.
    wrong = [layer for layer in model.no_recompute_layers if layer >= model.num_layers]
    if wrong:
        message = (
            f"layer {one_of(wrong[:5])} does not exist: the model has {model.num_layers} layers"
        )
        yield NO_RECOMPUTE.found(
            "Model.no_recompute_layers", wrong, message, f"use 0 to {model.num_layers - 1}"
        )
    # More chunks than layers is reported by rule L006; here it must not lead to empty chunks.
    chunks = distributed.pp_degree * model.virtual_pp_degree
    longest = max(len(part) for part in segments(model.num_layers, min(chunks, model.num_layers)))
    interval = distributed.pp_recompute_interval
    in_use = (
        model.use_recompute and model.recompute_granularity == "full" and distributed.pp_degree > 1
    )
    if in_use and interval > longest:
        message = f"{interval} is more than the {longest} layers of a pipeline chunk"
        yield INTERVAL.found(
            "Distributed.pp_recompute_interval", interval, message, f"use {longest} or less"
        )


def _check_distributed(run: RunConfig) -> Iterator[Finding]:
    distributed, device = run.Distributed, run.Global.device
    sharding = distributed.sharding
    if sharding.sharding_degree > 1 and sharding.sharding_stage == 0:
        message = f"stage 0 turns sharding off, but sharding_degree is {sharding.sharding_degree}"
        hint = "use stage 1, 2 or 3, or sharding_degree 1"
        yield STAGE.found("Distributed.sharding.sharding_stage", 0, message, hint)
    if device == "cpu" and distributed.backend == "nccl":
        yield BACKEND.found(
            "Distributed.backend",
            "nccl",
            "nccl does not work with Global.device: cpu",
            "use gloo, or leave it empty",
        )
    if device == "gpu" and distributed.backend == "gloo":
        message = "gloo is slow on GPUs: it copies every tensor to the host"
        yield GLOO_ON_GPU.found(
            "Distributed.backend", "gloo", message, "leave it empty to use nccl"
        )
    if (
        run.Engine.save_load.snapshot_path
        and distributed.mp_degree * distributed.pp_degree * sharding.sharding_degree > 1
    ):
        message = "a snapshot needs the whole model on one rank, but this layout splits the model"
        hint = "leave it empty: checkpoints in output_dir can be resumed in any layout"
        path = run.Engine.save_load.snapshot_path
        yield SNAPSHOT.found("Engine.save_load.snapshot_path", path, message, hint)


def _check_engine(run: RunConfig) -> Iterator[Finding]:
    if run.Engine.run_mode == "step" and run.Engine.max_steps <= 0:
        message = f"max_steps is {run.Engine.max_steps}: nothing would be trained"
        yield STEPS.found(
            "Engine.max_steps", run.Engine.max_steps, message, "use 1 or more, or run_mode: epoch"
        )
    if run.Model.virtual_pp_degree > 2:
        message = (
            f"{run.Model.virtual_pp_degree} chunks per stage add more communication "
            "than they save idle time"
        )
        yield MANY_CHUNKS.found(
            "Model.virtual_pp_degree", run.Model.virtual_pp_degree, message, "use 1 or 2"
        )


def _check_other_sections(run: RunConfig) -> Iterator[Finding]:
    generation = run.Generation
    if generation.min_dec_len > generation.max_dec_len:
        message = f"{generation.min_dec_len} is more than max_dec_len {generation.max_dec_len}"
        hint = "swap min_dec_len and max_dec_len"
        yield DECODE.found("Generation.min_dec_len", generation.min_dec_len, message, hint)


def _check_profiler(run: RunConfig) -> Iterator[Finding]:
    steps, max_steps = list(run.Profiler.scheduler), run.Engine.max_steps
    key = "Profiler.scheduler"
    if len(steps) != 2 or steps[0] >= steps[1]:
        message = f"{steps} is not a range of steps"
        yield PROFILE_STEPS.found(key, steps, message, "write [first, last + 1], such as [1, 5]")
    elif run.Profiler.enable and steps[0] == 0:
        # Paddle counts from 0; here the log and checkpoints count from 1.
        hint = f"write [1, {steps[1] + 1}] for as many steps from the first one"
        yield PROFILE_STEPS.found(key, steps, "there is no step 0: the first step is 1", hint)
    # In epoch mode, only the trainer knows the number of steps.
    elif run.Profiler.enable and run.Engine.run_mode == "step" and 0 < max_steps < steps[1] - 1:
        what = "nothing" if steps[0] > max_steps else f"only up to step {max_steps}"
        message = f"the run ends at step {max_steps}, so {what} would be recorded"
        first = min(steps[0], max(1, max_steps - 3))
        hint = f"use [{first}, {max_steps + 1}], or train longer"
        yield PROFILE_LENGTH.found(key, steps, message, hint)


def _without_effect(run: RunConfig) -> Iterator[Finding]:
    """Settings that need another layout. Like FleetX, `resolve.py` warns and switches them off."""
    distributed = run.Distributed
    mp, pp, sharding = distributed.mp_degree, distributed.pp_degree, distributed.sharding
    shards = (sharding.sharding_degree > 1, (_SHARDING[0],), "it needs sharding_degree > 1")
    can_fuse = mp * pp == 1
    settings: list[tuple[str, bool, tuple[str, ...], str]] = [
        ("Model.sequence_parallel", mp > 1, (MP,), "it needs mp_degree > 1"),
        ("Model.virtual_pp_degree", pp > 1, (PP,), "it needs pp_degree > 1"),
        (
            "Distributed.pp_schedule",
            pp > 1 and run.Model.virtual_pp_degree == 1,
            (PP, "Model.virtual_pp_degree"),
            "it needs pp_degree > 1 and virtual_pp_degree 1",
        ),
        ("Distributed.sharding.reduce_overlap", *shards),
        ("Distributed.sharding.broadcast_overlap", *shards),
        ("Distributed.sharding.sharding_offload", *shards),
        ("Optimizer.tensor_fusion", can_fuse, (MP, PP), "it needs mp_degree 1 and pp_degree 1"),
    ]
    for key, works, uses, needs in settings:
        value = value_at(run, key)
        if value != OFF.get(key, False) and not works:
            yield NO_EFFECT.using(key, *uses).found(
                key, value, f"no effect in this layout: {needs}", "delete the key"
            )


def _done_anyway(run: RunConfig) -> Iterator[Finding]:
    """Settings that change nothing, because the trainer has only one way to do it."""
    sharding = run.Distributed.sharding
    if sharding.reduce_overlap and sharding.sharding_degree > 1:
        message = "no change: gradient reduction always overlaps with the backward pass"
        key = "Distributed.sharding.reduce_overlap"
        yield ALWAYS.using(key, *_SHARDING).found(key, True, message)
    if sharding.sharding_offload and sharding.sharding_degree > 1 and run.Global.device == "cpu":
        message = "no change: with Global.device: cpu, all state is in host memory anyway"
        yield ON_THE_CPU.found("Distributed.sharding.sharding_offload", True, message)
    if run.Optimizer.tensor_fusion and run.Distributed.mp_degree * run.Distributed.pp_degree == 1:
        message = "no change: one fused kernel updates all tensors in place, without flat buffers"
        yield ALWAYS.using("Optimizer.tensor_fusion", MP, PP).found(
            "Optimizer.tensor_fusion", True, message
        )
    if not run.Engine.save_load.load_optimizer and run.Engine.save_load.ckpt_dir in (None, "auto"):
        message = "no change: ckpt_dir names no checkpoint of another run to take the weights of"
        key = "Engine.save_load.load_optimizer"
        yield ALWAYS.using(key, "Engine.save_load.ckpt_dir").found(key, False, message)
    if run.Model.scale_qk_by_layer_num:
        message = (
            "no change: the fused attention kernel scales before it multiplies, so float16 is safe"
        )
        yield ALWAYS.using("Model.scale_qk_by_layer_num").found(
            "Model.scale_qk_by_layer_num", True, message
        )
    if run.Engine.tf32 and run.Global.device == "cpu":
        message = "no change: only GPUs can multiply in TF32"
        yield ALWAYS.using("Engine.tf32", "Global.device").found("Engine.tf32", True, message)
    if not run.Model.fuse_attn_qkv:
        message = "no change: query, key and value always share one projection"
        yield ALWAYS.using("Model.fuse_attn_qkv").found("Model.fuse_attn_qkv", False, message)


def value_at(run: RunConfig, path: str) -> Any:
    """The value of a key path such as `Model.hidden_size`."""
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    return value
