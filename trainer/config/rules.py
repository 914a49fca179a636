"""Rules over a whole run config that are not about the layout: what contradicts, what has no effect, what is unwise."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.sections import RunConfig
from trainer.errors import Finding, Rule, one_of
from trainer.layout import segments

POSITIONS = Rule("T001", "max_seq_len is at most max_position_embeddings", uses=("Data", "Model"))
NO_RECOMPUTE = Rule("T002", "no_recompute_layers are numbers of layers", uses=("Model",))
INTERVAL = Rule(
    "T003", "pp_recompute_interval is at most the layers of a pipeline chunk", uses=("Model", "Distributed")
)
STAGE = Rule("T004", "sharding_degree > 1 needs sharding_stage 1, 2 or 3", uses=("Distributed.sharding",))
BACKEND = Rule("T005", "nccl needs GPUs", uses=("Global.device", "Distributed.backend"))
CHAR_PATH = Rule("T006", "a CharDataset names its text", uses=("Data",))
SPLIT = Rule("T007", "some documents are trained on", uses=("Data",))
PROFILE_STEPS = Rule("T008", "the profiled steps are [first, last + 1]", uses=("Profiler",))
DECODE = Rule("T009", "min_dec_len is at most max_dec_len", uses=("Generation",))
LR_ORDER = Rule("T020", "min_lr is at most max_lr", "warning", uses=("Optimizer.lr",))
NO_EFFECT = Rule("T021", "a setting that is switched on has an effect", "warning", uses=("Distributed", "Model"))
GLOO_ON_GPU = Rule("T022", "GPUs talk over nccl", "warning", uses=("Global.device", "Distributed.backend"))
MANY_CHUNKS = Rule("T023", "virtual_pp_degree is at most 2", "warning", uses=("Model",))


def check_run(run: RunConfig) -> Iterator[Finding]:
    yield from _check_data(run)
    yield from _check_recompute(run)
    yield from _check_distributed(run)
    yield from _check_sections(run)
    yield from _without_effect(run)


def _check_data(run: RunConfig) -> Iterator[Finding]:
    positions = run.Model.max_position_embeddings
    seen = set()
    for part in ("Train", "Eval", "Test"):
        dataset = getattr(run.Data, part).dataset
        path = f"Data.{part}.dataset"
        if dataset.max_seq_len > positions and dataset.max_seq_len not in seen:
            seen.add(dataset.max_seq_len)
            message = f"samples of {dataset.max_seq_len} tokens, but the model has {positions} positions"
            hint = f"set Model.max_position_embeddings to {dataset.max_seq_len}, or shorten the samples"
            yield POSITIONS.found(f"{path}.max_seq_len", dataset.max_seq_len, message, hint)
        if part == "Train" and dataset.name == "CharDataset" and not dataset.path:
            yield CHAR_PATH.found(
                f"{path}.path", None, "no text is named", "write a path, or builtin for the demo corpus"
            )
        if part == "Train" and not (dataset.split and dataset.split[0]):
            message = f"{list(dataset.split)} leaves nothing to train on"
            yield SPLIT.found(f"{path}.split", list(dataset.split), message, "write shares such as [949, 50, 1]")


def _check_recompute(run: RunConfig) -> Iterator[Finding]:
    model, distributed = run.Model, run.Distributed
    wrong = [layer for layer in model.no_recompute_layers if layer >= model.num_layers]
    if wrong:
        message = f"layer {one_of(wrong[:5])} of a model with {model.num_layers} layers"
        yield NO_RECOMPUTE.found("Model.no_recompute_layers", wrong, message, f"use 0 to {model.num_layers - 1}")
    chunks = distributed.pp_degree * model.virtual_pp_degree
    longest = max(len(part) for part in segments(model.num_layers, min(chunks, model.num_layers)))
    if model.use_recompute and distributed.pp_degree > 1 and distributed.pp_recompute_interval > longest:
        message = f"{distributed.pp_recompute_interval} is more than the {longest} layers of a pipeline chunk"
        key, value = "Distributed.pp_recompute_interval", distributed.pp_recompute_interval
        yield INTERVAL.found(key, value, message, f"use {longest} or less")


def _check_distributed(run: RunConfig) -> Iterator[Finding]:
    distributed, device = run.Distributed, run.Global.device
    sharding = distributed.sharding
    if sharding.sharding_degree > 1 and sharding.sharding_stage == 0:
        message = f"stage 0 turns sharding off, but sharding_degree is {sharding.sharding_degree}"
        hint = "use stage 1, 2 or 3, or sharding_degree 1"
        yield STAGE.found("Distributed.sharding.sharding_stage", 0, message, hint)
    if device == "cpu" and distributed.backend == "nccl":
        yield BACKEND.found("Distributed.backend", "nccl", "nccl with device cpu", "use gloo, or leave it empty")
    if device == "gpu" and distributed.backend == "gloo":
        yield GLOO_ON_GPU.found("Distributed.backend", "gloo", "gloo copies every tensor to the host", "leave it empty")


def _check_sections(run: RunConfig) -> Iterator[Finding]:
    lr = run.Optimizer.lr
    if lr.name != "none" and lr.min_lr > lr.max_lr:
        message = f"min_lr {lr.min_lr:g} is above max_lr {lr.max_lr:g}: the rate rises instead of falling"
        yield LR_ORDER.found("Optimizer.lr.min_lr", lr.min_lr, message, "exchange the two")
    steps = run.Profiler.scheduler
    if len(steps) != 2 or steps[0] >= steps[1]:
        yield PROFILE_STEPS.found("Profiler.scheduler", list(steps), f"{list(steps)} is no range", "write [1, 5]")
    if run.Generation.min_dec_len > run.Generation.max_dec_len:
        message = f"{run.Generation.min_dec_len} is more than max_dec_len {run.Generation.max_dec_len}"
        yield DECODE.found("Generation.min_dec_len", run.Generation.min_dec_len, message, "exchange the two")
    if run.Model.virtual_pp_degree > 2:
        message = f"{run.Model.virtual_pp_degree} chunks per stage talk more than they save"
        yield MANY_CHUNKS.found("Model.virtual_pp_degree", run.Model.virtual_pp_degree, message, "use 1 or 2")


def _without_effect(run: RunConfig) -> Iterator[Finding]:
    model, distributed = run.Model, run.Distributed
    sharding = distributed.sharding
    overlap_works = sharding.sharding_stage == 2 and not sharding.sharding_offload and sharding.sharding_degree > 1
    overlap_needs = "it needs sharding_degree > 1, stage 2 and no offload"
    idle = [
        ("Model.sequence_parallel", model.sequence_parallel and distributed.mp_degree == 1, "it needs mp_degree > 1"),
        (
            "Model.virtual_pp_degree",
            model.virtual_pp_degree > 1 and distributed.pp_degree == 1,
            "it needs pp_degree > 1",
        ),
        ("Distributed.sharding.reduce_overlap", sharding.reduce_overlap and not overlap_works, overlap_needs),
        ("Distributed.sharding.broadcast_overlap", sharding.broadcast_overlap and not overlap_works, overlap_needs),
        (
            "Distributed.sharding.broadcast_overlap",
            sharding.broadcast_overlap and overlap_works and run.Engine.logging_freq == 1,
            "logging every step waits for the broadcast: it needs logging_freq > 1",
        ),
        (
            "Distributed.sharding.sharding_offload",
            sharding.sharding_offload and (run.Global.device == "cpu" or sharding.sharding_degree == 1),
            "it needs sharding_degree > 1 and a GPU",
        ),
        (
            "Optimizer.tensor_fusion",
            run.Optimizer.tensor_fusion and distributed.mp_degree * distributed.pp_degree > 1,
            "it needs mp_degree 1 and pp_degree 1",
        ),
    ]
    for key, applies, reason in idle:
        if applies:
            yield NO_EFFECT.found(key, True, f"no effect here: {reason}", "delete the key")
