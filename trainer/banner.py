"""What a run says before its first step: its config, its layout, its model, its data."""

from __future__ import annotations

from trainer.config.read import paths_of
from trainer.config.rules import value_at
from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.estimate import count_parameters, layer_parameters
from trainer.layout import AXES
from trainer.mesh import Mesh
from trainer.metrics import Log


def announce(run: RunConfig, mesh: Mesh, log: Log, splits: Splits, length: Length) -> None:
    if log.style == "mingpt":
        if splits.characters:
            log.plain(f"Data has {splits.characters.length} characters, {len(splits.characters.vocabulary)} unique.")
        blocks = run.Model.num_layers * layer_parameters(run.Model, 1)
        log.plain(f"number of parameters: {blocks / 1e6:.2f}M")
        return
    log.info("\n".join(f"{path:<44} {value_at(run, path)}" for path in paths_of(RunConfig)))
    layout = mesh.layout
    log.info(f"The distributed run, total device num:{layout.world}, distinct dataflow num:{layout.data_ranks}.")
    groups = ", ".join(f"{axis} {list(layout.group(axis, mesh.rank))}" for axis in reversed(AXES))
    log.write(f"rank {mesh.rank}: {layout} on {mesh.device}, groups: {groups}", "INFO")
    if splits.characters:
        log.info(f"Data has {splits.characters.length} characters, {len(splits.characters.vocabulary)} unique.")
    wanted = {"valid": run.Engine.eval_freq > 0 and run.Engine.eval_iters, "test": run.Engine.test_iters}
    for name, iterations in wanted.items():
        if iterations and getattr(splits, name) is None and mesh.is_first and not run.Engine.check_accuracy:
            log.warn(f"the {name} split has not one whole sample: nothing is evaluated on it")
    log.info(f"Model Size: {count_parameters(run.Model) / 1e9:.2f} B ({count_parameters(run.Model):,} parameters)")
    log.info(
        f"{length.max_steps} steps of {run.Global.global_batch_size} samples, {splits.train.size} samples to train on"
    )
