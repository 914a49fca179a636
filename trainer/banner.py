"""What a run says before its first step: its config, its layout, its model, its data."""

from __future__ import annotations

from trainer.config.read import paths_of
from trainer.config.rules import value_at
from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.estimate import count_parameters, layer_parameters, stage_memory
from trainer.layout import AXES, own_chunks, segments
from trainer.mesh import Mesh
from trainer.metrics import Log
from trainer.optim import Weight


def announce(
    run: RunConfig, mesh: Mesh, log: Log, splits: Splits, length: Length, weights: list[Weight]
) -> None:
    if log.style == "mingpt":
        if splits.characters:
            log.plain(
                f"Data has {splits.characters.length} characters, {len(splits.characters.vocabulary)} unique."
            )
        blocks = run.Model.num_layers * layer_parameters(run.Model, 1)
        log.plain(f"number of parameters: {blocks / 1e6:.2f}M")
        return
    log.info("\n".join(f"{path:<44} {value_at(run, path)}" for path in paths_of(RunConfig)))
    layout = mesh.layout
    log.info(
        f"The distributed run, total device num:{layout.world}, distinct dataflow num:{layout.data_ranks}."
    )
    groups = ", ".join(f"{axis} {list(layout.group(axis, mesh.rank))}" for axis in reversed(AXES))
    log.write(f"rank {mesh.rank}: {layout} on {mesh.device}, groups: {groups}", "INFO")
    if layout.pp > 1:
        chunks = segments(run.Model.num_layers, layout.pp * run.Model.virtual_pp_degree)
        log.info(
            f"pipeline segments: {', '.join(str(chunk.start) for chunk in chunks)}, {run.Model.num_layers}"
        )
    log.write(f"rank {mesh.rank}: {_holdings(run, mesh, weights)}", "INFO")
    if layout.pp > 1 and layout.sharding > 1 and run.Distributed.sharding.sharding_stage > 1:
        log.info(
            "with pp_degree > 1, gradients stay whole until the last micro-batch of an update, as in stage 1"
        )
    if splits.characters:
        log.info(
            f"Data has {splits.characters.length} characters, {len(splits.characters.vocabulary)} unique."
        )
    wanted = {
        "valid": run.Engine.eval_freq > 0 and run.Engine.eval_iters,
        "test": run.Engine.test_iters,
    }
    for name, iterations in wanted.items():
        if (
            iterations
            and getattr(splits, name) is None
            and mesh.is_first
            and not run.Engine.check_accuracy
        ):
            log.warn(f"the {name} split has not one whole sample: nothing is evaluated on it")
    log.info(
        f"Model Size: {count_parameters(run.Model) / 1e9:.2f} B ({count_parameters(run.Model):,} parameters)"
    )
    log.info(
        f"{length.max_steps} steps of {run.Global.global_batch_size} samples, {splits.train.size} samples to train on"
    )


def _holdings(run: RunConfig, mesh: Mesh, weights: list[Weight]) -> str:
    """What this rank has by now, next to what was estimated for its stage."""
    chunks = own_chunks(mesh.layout, run.Model.num_layers, run.Model.virtual_pp_degree, mesh.rank)
    layers = ", ".join(f"{layers.start} to {layers.stop - 1}" for _, layers in chunks)
    own, optimizer = (
        sum(weight.own_bytes for weight in weights),
        sum(weight.optimizer_bytes for weight in weights),
    )
    estimated = stage_memory(run, mesh.layout, mesh.at.pp)
    parts = {"parameters": own, "optimizer": optimizer}
    held = ", ".join(f"{name} {mebibytes(measured)}" for name, measured in parts.items())
    expected = ", ".join(f"{name} {mebibytes(size)}" for name, size in estimated._asdict().items())
    return f"layers {layers}; its own part: {held}; estimated while the passes run: {expected}"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"
