"""Rules over a whole run config that are not about the layout: what contradicts, what has no effect, what is unwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.sections import Dataset, RunConfig
from trainer.errors import Finding, Rule, one_of
from trainer.layout import DEGREE_KEYS, segments

_LAYERS = ("Model.name", "Model.num_layers")
MP, PP = DEGREE_KEYS["mp"], DEGREE_KEYS["pp"]
_SHARDING = ("Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage")

POSITIONS = Rule("T001", "max_seq_len is at most max_position_embeddings")
NO_RECOMPUTE = Rule(
    "T002",
    "no_recompute_layers are numbers of layers",
    uses=("Model.no_recompute_layers", *_LAYERS),
)
INTERVAL = Rule(
    "T003",
    "pp_recompute_interval is at most the layers of a pipeline chunk",
    uses=(
        "Distributed.pp_recompute_interval",
        "Distributed.pp_degree",
        "Model.virtual_pp_degree",
        *_LAYERS,
    ),
)
STAGE = Rule("T004", "sharding_degree > 1 needs sharding_stage 1, 2 or 3", uses=_SHARDING)
BACKEND = Rule("T005", "nccl needs GPUs", uses=("Global.device", "Distributed.backend"))
CHAR_PATH = Rule("T006", "a CharDataset names its text")
SPLIT = Rule("T007", "some documents are trained on", uses=("Data.Train.dataset.split",))
PROFILE_STEPS = Rule(
    "T008", "the profiled steps are [first, last + 1]", uses=("Profiler.scheduler",)
)
DECODE = Rule(
    "T009",
    "min_dec_len is at most max_dec_len",
    uses=("Generation.min_dec_len", "Generation.max_dec_len"),
)
STEPS = Rule(
    "T010", "run_mode step has max_steps above 0", uses=("Engine.run_mode", "Engine.max_steps")
)
LR_ORDER = Rule(
    "T020",
    "min_lr is at most max_lr",
    "warning",
    uses=("Optimizer.lr.min_lr", "Optimizer.lr.max_lr", "Optimizer.lr.name"),
)
NO_EFFECT = Rule("T021", "a setting that is switched on has an effect", "warning")
NO_EVALUATION = Rule(
    "T026",
    "some documents are evaluated on",
    "warning",
    uses=("Data.Eval.dataset.split", "Data.Train.dataset.split", "Engine.eval_freq"),
)
GLOO_ON_GPU = Rule(
    "T022", "GPUs talk over nccl", "warning", uses=("Global.device", "Distributed.backend")
)
MANY_CHUNKS = Rule(
    "T023", "virtual_pp_degree is at most 2", "warning", uses=("Model.virtual_pp_degree",)
)

ALWAYS = Rule("N004", "a setting changes what is done", "notice")
ON_THE_CPU = Rule(
    "N005",
    "sharding_offload frees the memory of a GPU",
    "notice",
    uses=(
        "Distributed.sharding.sharding_offload",
        "Distributed.sharding.sharding_degree",
        "Global.device",
    ),
)
LENGTHS = Rule(
    "T012",
    "with pp_degree > 1 or sequence_parallel, Eval and Test samples are as long as those of Train",
)
SNAPSHOT = Rule(
    "T011",
    "a snapshot is written by a rank that holds the whole model",
    uses=("Engine.save_load.snapshot_path", MP, PP, DEGREE_KEYS["sharding"]),
)

# What a setting without effect is replaced by, where it is not a switch.
OFF: dict[str, Any] = {"Model.virtual_pp_degree": 1, "Distributed.pp_schedule": "1F1B"}


def check_run(run: RunConfig) -> Iterator[Finding]:
    yield from _check_data(run)
    yield from _check_recompute(run)
    yield from _check_distributed(run)
    yield from _check_engine(run)
    yield from _check_other_sections(run)
    yield from _without_effect(run)
    yield from _done_anyway(run)


def _check_data(run: RunConfig) -> Iterator[Finding]:
    seen: list[Dataset] = []
    for part in ("Train", "Eval", "Test"):
        dataset = getattr(run.Data, part).dataset
        if dataset not in seen:  # what Eval and Test take over from Train is one mistake
            yield from _check_dataset(
                dataset, f"Data.{part}.dataset", run.Model.max_position_embeddings
            )
        seen.append(dataset)
    yield from _check_lengths(run)
    yield from _check_split(run)


def _check_lengths(run: RunConfig) -> Iterator[Finding]:
    """Stages and sequence parts have their shapes before the first step."""
    wanted = run.Data.Train.dataset.max_seq_len
    for part in (
        ("Eval", "Test") if run.Distributed.pp_degree > 1 or run.Model.sequence_parallel else ()
    ):
        length, path = (
            getattr(run.Data, part).dataset.max_seq_len,
            f"Data.{part}.dataset.max_seq_len",
        )
        if length != wanted:
            rule = LENGTHS.using(
                path, "Data.Train.dataset.max_seq_len", PP, "Model.sequence_parallel"
            )
            yield rule.found(
                path,
                length,
                f"{length} tokens, but Train has {wanted}",
                f"use {wanted}, or leave it empty",
            )


def _check_split(run: RunConfig) -> Iterator[Finding]:
    train, evaluation, hint = (
        run.Data.Train.dataset,
        run.Data.Eval.dataset,
        "write shares such as [949, 50, 1]",
    )
    if train.name == "GPTDataset" and not any(train.split[:1]):
        message = f"{list(train.split)} leaves nothing to train on"
        yield SPLIT.found("Data.Train.dataset.split", list(train.split), message, hint)
    elif (
        evaluation.name == "GPTDataset"
        and run.Engine.eval_freq > 0
        and not any(evaluation.split[1:2])
    ):
        message = f"{list(evaluation.split)} leaves nothing to evaluate on"
        yield NO_EVALUATION.found(
            "Data.Eval.dataset.split", list(evaluation.split), message, f"{hint}, or eval_freq: 0"
        )


def _check_dataset(dataset: Dataset, path: str, positions: int) -> Iterator[Finding]:
    if dataset.max_seq_len > positions:
        message = (
            f"samples of {dataset.max_seq_len} tokens, but the model has {positions} positions"
        )
        hint = f"set Model.max_position_embeddings to {dataset.max_seq_len}, or shorten the samples"
        rule = POSITIONS.using(f"{path}.max_seq_len", "Model.max_position_embeddings", "Model.name")
        yield rule.found(f"{path}.max_seq_len", dataset.max_seq_len, message, hint)
    if dataset.name == "CharDataset" and not dataset.path:
        rule = CHAR_PATH.using(f"{path}.path", f"{path}.name")
        yield rule.found(
            f"{path}.path", None, "no text is named", "write a path, or builtin for the demo corpus"
        )


def _check_recompute(run: RunConfig) -> Iterator[Finding]:
    model, distributed = run.Model, run.Distributed
    wrong = [layer for layer in model.no_recompute_layers if layer >= model.num_layers]
    if wrong:
        message = f"layer {one_of(wrong[:5])} of a model with {model.num_layers} layers"
        yield NO_RECOMPUTE.found(
            "Model.no_recompute_layers", wrong, message, f"use 0 to {model.num_layers - 1}"
        )
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
            "Distributed.backend", "nccl", "nccl with device cpu", "use gloo, or leave it empty"
        )
    if device == "gpu" and distributed.backend == "gloo":
        yield GLOO_ON_GPU.found(
            "Distributed.backend", "gloo", "gloo copies every tensor to the host", "leave it empty"
        )
    if (
        run.Engine.save_load.snapshot_path
        and distributed.mp_degree * distributed.pp_degree * sharding.sharding_degree > 1
    ):
        message = "the model is spread over ranks, a snapshot is one file with all of it"
        hint = "leave it empty: checkpoints in output_dir go on in any layout"
        path = run.Engine.save_load.snapshot_path
        yield SNAPSHOT.found("Engine.save_load.snapshot_path", path, message, hint)


def _check_engine(run: RunConfig) -> Iterator[Finding]:
    if run.Engine.run_mode == "step" and run.Engine.max_steps <= 0:
        message = f"{run.Engine.max_steps} updates are none"
        yield STEPS.found(
            "Engine.max_steps", run.Engine.max_steps, message, "use 1 or more, or run_mode: epoch"
        )
    lr = run.Optimizer.lr
    if lr.name != "none" and lr.min_lr > lr.max_lr:
        message = (
            f"min_lr {lr.min_lr:g} is above max_lr {lr.max_lr:g}: the rate rises instead of falling"
        )
        yield LR_ORDER.found("Optimizer.lr.min_lr", lr.min_lr, message, "exchange the two")
    if run.Model.virtual_pp_degree > 2:
        message = f"{run.Model.virtual_pp_degree} chunks per stage talk more than they save"
        yield MANY_CHUNKS.found(
            "Model.virtual_pp_degree", run.Model.virtual_pp_degree, message, "use 1 or 2"
        )


def _check_other_sections(run: RunConfig) -> Iterator[Finding]:
    steps, generation = run.Profiler.scheduler, run.Generation
    if len(steps) != 2 or steps[0] >= steps[1]:
        yield PROFILE_STEPS.found(
            "Profiler.scheduler", list(steps), f"{list(steps)} is no range", "write [1, 5]"
        )
    if generation.min_dec_len > generation.max_dec_len:
        message = f"{generation.min_dec_len} is more than max_dec_len {generation.max_dec_len}"
        yield DECODE.found(
            "Generation.min_dec_len", generation.min_dec_len, message, "exchange the two"
        )


def _without_effect(run: RunConfig) -> Iterator[Finding]:
    """Settings that FleetX switches off with a warning; `resolve.py` does so too."""
    distributed = run.Distributed
    mp, pp, sharding = distributed.mp_degree, distributed.pp_degree, distributed.sharding
    spreads = (sharding.sharding_degree > 1, (_SHARDING[0],), "it needs sharding_degree > 1")
    fuses = mp * pp == 1
    settings: list[tuple[str, bool, tuple[str, ...], str]] = [
        ("Model.sequence_parallel", mp > 1, (MP,), "it needs mp_degree > 1"),
        ("Model.virtual_pp_degree", pp > 1, (PP,), "it needs pp_degree > 1"),
        (
            "Distributed.pp_schedule",
            pp > 1 and run.Model.virtual_pp_degree == 1,
            (PP, "Model.virtual_pp_degree"),
            "it needs pp_degree > 1 and virtual_pp_degree 1",
        ),
        ("Distributed.sharding.reduce_overlap", *spreads),
        ("Distributed.sharding.broadcast_overlap", *spreads),
        ("Distributed.sharding.sharding_offload", *spreads),
        ("Optimizer.tensor_fusion", fuses, (MP, PP), "it needs mp_degree 1 and pp_degree 1"),
    ]
    for key, works, uses, needs in settings:
        value = value_at(run, key)
        if value != OFF.get(key, False) and not works:
            yield NO_EFFECT.using(key, *uses).found(
                key, value, f"no effect here: {needs}", "delete the key"
            )


def _done_anyway(run: RunConfig) -> Iterator[Finding]:
    """What the trainer does in one way only, whatever is written."""
    sharding = run.Distributed.sharding
    if sharding.reduce_overlap and sharding.sharding_degree > 1:
        message = "gradients are always reduced while the backward pass still runs"
        key = "Distributed.sharding.reduce_overlap"
        yield ALWAYS.using(key, *_SHARDING).found(key, True, message)
    if sharding.sharding_offload and sharding.sharding_degree > 1 and run.Global.device == "cpu":
        message = "parameters, gradients and optimizer state are in the memory of the host anyway: this gains nothing"
        yield ON_THE_CPU.found("Distributed.sharding.sharding_offload", True, message)
    if run.Optimizer.tensor_fusion and run.Distributed.mp_degree * run.Distributed.pp_degree == 1:
        message = "one kernel updates all tensors where they are: flat buffers would only copy"
        yield ALWAYS.using("Optimizer.tensor_fusion", MP, PP).found(
            "Optimizer.tensor_fusion", True, message
        )
    if run.Model.scale_qk_by_layer_num:
        message = "attention is one kernel that scales before it multiplies: nothing overflows"
        yield ALWAYS.using("Model.scale_qk_by_layer_num").found(
            "Model.scale_qk_by_layer_num", True, message
        )
    if not run.Model.fuse_attn_qkv:
        message = "query, key and value are one projection in any case"
        yield ALWAYS.using("Model.fuse_attn_qkv").found("Model.fuse_attn_qkv", False, message)


def value_at(run: RunConfig, path: str) -> Any:
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    return value
