"""Saving a run and going on with it: which checkpoint or snapshot, whether it fits, and what is taken over from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpoints, Facts
from trainer.checkpoint.snapshot import load_snapshot, save_snapshot
from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.mesh import Mesh
from trainer.metrics import Log
from trainer.state import Progress, Training
from trainer.stop import STATUS, write_status

MODEL_KEYS = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size vocab_size vocab_size_divisible_unit "
    "max_position_embeddings scale_qk_by_layer_num"
).split()


def output_dir(run: RunConfig) -> Path:
    return Path(run.Engine.save_load.output_dir or "./output")


@contextmanager
def output_folder(run: RunConfig, mesh: Mesh, log: Log) -> Iterator[Checkpoints]:
    """The run's own folder, which no other run writes to meanwhile."""
    checkpoints = Checkpoints(output_dir(run), run.Engine.save_load.keep_last, mesh, log.info, log.warn)
    if mesh.is_first:
        checkpoints.store.open_for_writing()
    mesh.barrier()
    try:
        yield checkpoints
    except UserError as error:
        tell(run, mesh, log, "failed", reason=error.message)
        raise
    finally:
        checkpoints.close()


def tell(run: RunConfig, mesh: Mesh, log: Log, state: str, **facts: Any) -> None:
    """Leaves word for the launcher: an exit code cannot tell a run that stopped on purpose from one that failed."""
    if mesh.is_first:
        try:
            write_status(output_dir(run) / STATUS, state, **facts)
        except OSError as error:
            log.warn(f"{STATUS} cannot be written: {error.strerror}")


def restore(t: Training, checkpoints: Checkpoints) -> None:
    """Goes on from a snapshot or a checkpoint, if there is one to go on from."""
    if t.run.Engine.save_load.snapshot_path:
        return _restore_snapshot(t, Path(t.run.Engine.save_load.snapshot_path))
    own = checkpoints.store
    ckpt_dir = "auto" if _is_restart(t.mesh) else t.run.Engine.save_load.ckpt_dir
    folder = checkpoints.find(ckpt_dir) if ckpt_dir else None
    is_own = folder is not None and folder.parent.resolve() == own.folder.resolve()
    if not is_own and own.checkpoints() and not t.run.Engine.check_accuracy:
        hint = "set Engine.save_load.ckpt_dir: auto to go on with it, or another output_dir, or delete the folder"
        raise UserError(f"{own.folder} holds the checkpoints of an earlier run", hint)
    if folder is None:
        return None
    facts = checkpoints.load(folder, t.optimizer.tensors(), lambda facts: _check_same_model(t, facts, folder))
    _take_over(t, facts)
    if is_own:
        checkpoints.go_on_from(facts["step"])
    return None


def _is_restart(mesh: Mesh) -> bool:
    """Whether torchrun has restarted the ranks. Only the agent whose rank failed counts it, so all are asked."""
    return mesh.total(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")[0] > 0


def _restore_snapshot(t: Training, file: Path) -> None:
    if not file.exists():
        t.log.plain("Snapshot not found. Training model from scratch")
        return
    facts, finished_epoch = load_snapshot(file, t.optimizer.tensors(), lambda facts: _check_same_model(t, facts, file))
    _take_over(t, facts)
    t.log.plain(f"Resuming training from snapshot at Epoch {finished_epoch}")


def _take_over(t: Training, facts: Facts) -> None:
    t.progress = Progress(facts["step"], facts["updates"], facts["samples"])
    t.precision.restore(facts["scaler"])
    t.optimizer.loaded(facts["updates"])
    if facts["order"] != _order(t) and t.mesh.is_first:
        t.log.warn("the data, its seed or its number of epochs differs from the checkpoint's: its order is another one")


def save(t: Training, checkpoints: Checkpoints, is_regular: bool) -> None:
    """A snapshot, or a checkpoint whose writing goes on beside the training."""
    snapshot_path = t.run.Engine.save_load.snapshot_path
    if not snapshot_path:
        checkpoints.save(t.progress.step, t.optimizer.tensors(), _facts_of(t))
    elif t.mesh.is_first:
        epoch = t.progress.step // t.length.steps_per_epoch
        try:
            save_snapshot(Path(snapshot_path), t.optimizer.tensors(), _facts_of(t), epoch)
            checkpoints.failure = ""
            t.log.plain(f"Snapshot saved at epoch {epoch}" if is_regular else f"Save model to {snapshot_path}")
        except OSError as error:
            checkpoints.failure = f"{snapshot_path}: {error.strerror}"
            t.log.warn(f"{snapshot_path} is not saved: {error.strerror}; the one before is kept")


def _facts_of(t: Training) -> Facts:
    """What a checkpoint says besides its tensors."""
    return {
        "step": t.progress.step,
        "updates": t.progress.updates,
        "samples": t.progress.samples,
        "scaler": t.precision.state(),
        "order": _order(t),
        "layout": t.mesh.layout._asdict(),
        "vocabulary": t.splits.characters.vocabulary if t.splits.characters else None,
        "torch": torch.__version__,
        "config": json.loads(json.dumps(asdict(t.run))),
    }


def _order(t: Training) -> list[int]:
    """What the order of samples depends on."""
    return [t.run.Global.seed, t.run.Data.Train.dataset.max_seq_len, t.splits.train.size]


def _check_same_model(t: Training, facts: Facts, where: Path) -> None:
    """Raises UserError when a checkpoint's model is another one, even where the shapes agree."""
    lacking = [key for key in _facts_of(t) if key not in facts]
    if lacking:
        raise UserError(f"{where} is refused: it does not say its {lacking[0]}", "use a checkpoint of this program")
    there, here = facts["config"]["Model"], asdict(t.run.Model)
    different = [f"{key} {there.get(key)} there, {here[key]} here" for key in MODEL_KEYS if there.get(key) != here[key]]
    vocabulary = t.splits.characters.vocabulary if t.splits.characters else None
    if not different and facts["vocabulary"] != vocabulary:
        different = ["its vocabulary has other characters"]
    if different:
        message = f"{where} is a checkpoint of another model: {'; '.join(different)}"
        raise UserError(message, "use the config it was made with, or leave Engine.save_load.ckpt_dir empty")
