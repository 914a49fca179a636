"""What a run logs before its first step: config, layout, memory, model, data and checkpoints."""

from __future__ import annotations

from trainer.checkpoint.signing import current_keys
from trainer.compiling import AUTO, is_on, missing_tools
from trainer.config.read import paths_of
from trainer.config.rules import value_at
from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.estimate import GIB, count_parameters, layer_parameters, stage_memory
from trainer.layout import AXES, own_chunks, segments
from trainer.logline import CONFIG_TITLE, length_line, rank_prefix
from trainer.mesh import Mesh
from trainer.metrics import Log
from trainer.optim import Weight
from trainer.resume import output_dir

BILLION, MILLION, THOUSAND, MIB = 10**9, 10**6, 10**3, 1 << 20


def announce(
    run: RunConfig, mesh: Mesh, log: Log, splits: Splits, length: Length, weights: list[Weight]
) -> None:
    if log.style == "mingpt":  # minGPT logs these two lines, and without a prefix
        _announce_like_mingpt(run, log, splits)
        return
    # Log viewers recognise this record by its title, and can fold or hide its hundred lines.
    log.info_block(CONFIG_TITLE, _config_lines(run))
    _announce_layout(run, mesh, log, weights)
    if mesh.shared_groups:
        log.info(f"Ranks share memory along: {', '.join(mesh.shared_groups)}")
    if splits.characters:
        log.info(_characters(splits))
    _warn_of_empty_splits(run, mesh, log, splits)
    log.info(f"Model Size: {model_size(count_parameters(run.Model))}")
    _announce_compiler(run, mesh, log)
    log.info(length_line(length.max_steps, run.Global.global_batch_size, splits.train.size))
    log.info(f"Checkpoints: {_checkpoints(run)}")


def _announce_compiler(run: RunConfig, mesh: Mesh, log: Log) -> None:
    device = mesh.device.type
    if is_on(run.Engine.compile, device):
        log.info("Layers are compiled with torch.compile: the first step takes longer.")
    elif run.Engine.compile == "auto" and device in AUTO:
        log.warn(f"layers are not compiled: no {' and no '.join(missing_tools(device))}")


def model_size(parameters: int) -> str:
    """`1.31 B (1,313,722,368 parameters)`; smaller ones in millions or thousands."""
    size = f"{parameters / MILLION:.2f} M"
    if parameters < MILLION // 10:
        size = f"{parameters / THOUSAND:.2f} K"
    if parameters >= BILLION:
        size = f"{parameters / BILLION:.2f} B"  # as in FleetX
    return f"{size} ({parameters:,} parameters)"


def _config_lines(run: RunConfig) -> list[str]:
    return [f"{path:<44} {value_at(run, path)}" for path in paths_of(RunConfig)]


def _announce_like_mingpt(run: RunConfig, log: Log, splits: Splits) -> None:
    if splits.characters:
        log.plain(_characters(splits))
    blocks = run.Model.num_layers * layer_parameters(run.Model)  # minGPT omits the embeddings
    log.plain(f"number of parameters: {blocks / MILLION:.2f}M")


def _characters(splits: Splits) -> str:
    assert splits.characters is not None
    unique = len(splits.characters.vocabulary)
    return f"Data has {splits.characters.length} characters, {unique} unique."


def _announce_layout(run: RunConfig, mesh: Mesh, log: Log, weights: list[Weight]) -> None:
    layout, rank = mesh.layout, rank_prefix(mesh.rank)
    log.info(
        f"The distributed run, total device num:{layout.world}, "
        f"distinct dataflow num:{layout.data_ranks}."
    )
    if layout.pp > 1:
        chunks = segments(run.Model.num_layers, layout.pp * run.Model.virtual_pp_degree)
        bounds = ", ".join(str(chunk.start) for chunk in chunks)
        log.info(
            f"pipeline segments: {bounds}, {run.Model.num_layers} (first layers, and the total)"
        )
    if layout.pp > 1 and layout.sharding > 1 and run.Distributed.sharding.sharding_stage > 1:
        # Until the last micro-batch of an update, since each micro-batch adds to them.
        log.info("with pp, ranks hold full gradients, as in sharding stage 1")
    # Not info(): every rank logs where it is and what it holds, in its own log.
    groups = ", ".join(f"{axis} {list(layout.group(axis, mesh.rank))}" for axis in reversed(AXES))
    log.write(f"{rank}{layout} on {mesh.device}, groups: {groups}", "INFO")
    log.write(f"{rank}{_held(run, mesh, weights)}", "INFO")
    log.write(f"{rank}{_estimated(run, mesh)}", "INFO")


def _held(run: RunConfig, mesh: Mesh, weights: list[Weight]) -> str:
    """The layers and the memory of this rank before the first step."""
    chunks = own_chunks(mesh.layout, run.Model.num_layers, run.Model.virtual_pp_degree, mesh.rank)
    layers = ", ".join(f"{layers.start} to {layers.stop - 1}" for _, layers in chunks)
    parameters = sum(weight.own_bytes for weight in weights)
    optimizer = sum(weight.optimizer_bytes for weight in weights)
    return (
        f"layers {layers}; memory held: parameters {memory(parameters)}, "
        f"optimizer state {memory(optimizer)}"
    )


def _estimated(run: RunConfig, mesh: Mesh) -> str:
    """What a rank of this pipeline stage needs during a step."""
    estimated = stage_memory(run, mesh.layout, mesh.at.pp)
    parts = ", ".join(f"{name} {memory(size)}" for name, size in estimated.parts.items() if size)
    return f"estimated peak memory: {memory(estimated.total)} ({parts})"


def _warn_of_empty_splits(run: RunConfig, mesh: Mesh, log: Log, splits: Splits) -> None:
    if not mesh.is_first or run.Engine.check_accuracy:
        return
    iterations = {
        "valid": run.Engine.eval_freq > 0 and run.Engine.eval_iters,
        "test": run.Engine.test_iters,
    }
    for name, wanted in iterations.items():
        if wanted and getattr(splits, name) is None:
            log.warn(f"the {name} split is too small for one sample: nothing is evaluated on it")


def _checkpoints(run: RunConfig) -> str:
    keeping = run.Engine.save_load
    if run.Engine.check_accuracy:
        return "none, because Engine.check_accuracy is on"
    number, unit = keeping.save_steps, "step"
    if run.Engine.run_mode == "epoch":
        number, unit = keeping.save_epoch, "epoch"
    often = f"every {number:,} {unit}s" if number > 1 else f"every {unit}"
    often = f"{often} and at the end" if number > 0 else "at the end"
    kept = f", the newest {keeping.keep_last} are kept" if keeping.keep_last else ""
    signed = ", signed" if current_keys() else ""
    return f"{keeping.snapshot_path or output_dir(run)}, {often}{kept}{signed}"


def memory(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"
