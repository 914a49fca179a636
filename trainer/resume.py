"""Saves and resumes a run: chooses a checkpoint or snapshot, checks it, and restores its state."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from trainer.checkpoint import Checkpoints, Facts, has_optimizer, load_tensors, only_weights
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.snapshot import load_snapshot, save_snapshot
from trainer.config.continuation import model_differences
from trainer.config.foreign_weights import foreign_weights, import_hint
from trainer.config.sections import Model, RunConfig
from trainer.corpus.metadata import FOLDER, copy_tokenizer
from trainer.data.epochs import Position
from trainer.errors import UserError
from trainer.event_names import CHECKPOINT, COMMITTED, SAVING
from trainer.events import Events
from trainer.logline import length_line
from trainer.mesh import PRIVATE_DISKS, Mesh
from trainer.metrics import Log
from trainer.model import GPT, build_model
from trainer.slices import shapes, whole
from trainer.state import Progress, Training

MAX_COUNT = 1 << 53  # floats count exactly up to here


def output_dir(run: RunConfig) -> Path:
    return Path(run.Engine.save_load.output_dir or "./output")


def how_to_resume() -> str:
    """The shortest way to resume this run later."""
    # gptctl gives every job an output folder of its own: `auto` would find it empty.
    job = os.environ.get("GPTCTL_JOB")
    return f"gptctl resume {job}" if job else "set Engine.save_load.ckpt_dir: auto"


@contextmanager
def output_folder(run: RunConfig, mesh: Mesh, log: Log, events: Events) -> Iterator[Checkpoints]:
    """Open the output folder of the run, and lock it: no other run may write to it meanwhile."""
    checkpoints = Checkpoints(
        output_dir(run), run.Engine.save_load.keep_last, mesh, log.info, log.warn
    )
    checkpoints.on_commit = partial(events.add, COMMITTED)
    checkpoints.open()
    try:
        yield checkpoints
    except BaseException:
        if mesh.world == 1:  # with more ranks, a pending save could wait for one that has exited
            checkpoints.close()
        raise
    checkpoints.close()


def choose_checkpoint(run: RunConfig, mesh: Mesh, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to resume from, if any. Never overwrites checkpoints of an earlier run."""
    keeping, own = run.Engine.save_load, checkpoints.store
    if keeping.snapshot_path:
        if keeping.ckpt_dir:
            raise UserError(
                "ckpt_dir and snapshot_path cannot be used together", "leave one of them empty"
            )
        return None
    # After a restart, resume this run's own checkpoints, whatever ckpt_dir says.
    folder = checkpoints.find("auto") if _is_restart(mesh) else None
    if folder is None and keeping.ckpt_dir:
        folder = _find_wanted(run, checkpoints)
    # Without this check, the run would mix its own checkpoints with those of another run.
    if any(mesh.gather(bool(own.checkpoints()) and not own.holds(folder))):
        hint = (
            "set Engine.save_load.ckpt_dir: auto to resume it, use another output_dir, "
            "or delete the folder"
        )
        raise UserError(f"{own.folder} contains checkpoints of an earlier run", hint)
    return folder


def _find_wanted(run: RunConfig, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint that the config names."""
    wanted = run.Engine.save_load.ckpt_dir
    assert wanted
    if problem := foreign_weights(wanted):
        raise UserError(problem, import_hint(wanted))
    folder = checkpoints.find(wanted)
    if wanted != "auto" and _starts_again(run) and checkpoints.store.holds(folder):
        # At step 0, its own checkpoints would be mixed with those that it starts from.
        hint = "use another output_dir, or ckpt_dir: auto to resume the run"
        raise UserError(f"{folder} is in output_dir, and load_optimizer is False", hint)
    return folder


def _starts_again(run: RunConfig) -> bool:
    return not run.Engine.save_load.load_optimizer


def restore(t: Training, checkpoints: Checkpoints, folder: Path | None) -> None:
    """Restore the state of a checkpoint, or of the snapshot if the run uses one."""
    if t.run.Engine.save_load.snapshot_path:
        _restore_snapshot(t, Path(t.run.Engine.save_load.snapshot_path))
    elif folder:
        # A run always resumes its own checkpoints completely, for example after a crash.
        is_new = _starts_again(t.run) and not checkpoints.store.holds(folder)
        shapes, state = _state_shapes(t.run.Model), t.optimizer.tensors()
        folder, facts = checkpoints.load(
            folder,
            only_weights(state) if is_new else state,
            shapes,
            partial(_check_same_model, t),
        )
        if is_new or not has_optimizer(facts):
            _start_with_weights(t, folder)
        else:
            _restore_progress(t, facts)
        if checkpoints.store.holds(folder):
            checkpoints.resumed_from(facts["step"])
    elif t.run.Engine.save_load.ckpt_dir:
        t.log.info(f"No checkpoint in {output_dir(t.run)}: training starts at step 0.")
    t.metrics.resume(t.progress.step)


def _start_with_weights(t: Training, folder: Path) -> None:
    """Start at step 0 with the weights that were loaded, and a new optimizer."""
    for name, piece in t.optimizer.tensors().items():
        # Another checkpoint may have been loaded in part before it was found to be damaged.
        if not name.startswith("model."):
            piece.tensor.zero_()
    t.optimizer.loaded(0)
    t.log.info(f"Training starts at step 0, with the weights of {folder} and a new optimizer.")


def whole_model(t: Training, checkpoints: Checkpoints) -> GPT:
    """All layers on this rank, from the newest checkpoint of this run."""
    # On the CPU: a model that is split over GPUs may be too large for one of them.
    model = build_model(t.run.Model, t.run.Global.seed, torch.device("cpu"))
    folder = checkpoints.store.checkpoints()[0]
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    try:
        damage = load_tensors(
            folder, read_manifest(folder), whole(weights), _state_shapes(t.run.Model)
        )
    except ValueError as error:
        damage = str(error)
    if damage:
        raise UserError(f"cannot load {folder}: {damage}", "check the disk")
    return model


def _state_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a checkpoint of this model, which is the same in all layouts."""
    with torch.device("meta"):  # only shapes are needed, no memory
        parameters = list(GPT(model).named_parameters())
    kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq")
    return shapes({f"{kind}.{name}": parameter for name, parameter in parameters for kind in kinds})


def _is_restart(mesh: Mesh) -> bool:
    """Whether ranks were restarted, or continue the job before theirs in the same folder.

    Ask all ranks, because only the torchrun whose rank failed counts the restart.
    """
    # Restarts by torchrun, attempts of the launcher, and jobs of a chain.
    names = ("TORCHELASTIC_RESTART_COUNT", "GPTCTL_ATTEMPT", "GPTCTL_CONTINUES")
    counts = [os.environ.get(name, "0") for name in names]
    return mesh.total(any(count != "0" for count in counts))[0] > 0


def _restore_snapshot(t: Training, file: Path) -> None:
    seen = t.mesh.gather(os.path.exists(file))
    if not seen[0]:
        t.log.plain("Snapshot not found. Training model from scratch")
        return
    if not all(seen):  # otherwise some ranks would resume and others start from scratch
        raise UserError(
            f"rank {seen.index(False)} cannot find {file}", "use a path that all nodes can read"
        )
    facts, finished_epoch = load_snapshot(
        file, t.optimizer.tensors(), lambda facts: _check_same_model(t, facts, file)
    )
    _restore_progress(t, facts)
    t.log.plain(f"Resuming training from snapshot at Epoch {finished_epoch}")


def _restore_progress(t: Training, facts: Facts) -> None:
    t.progress = Progress(facts["step"], facts["updates"], facts["samples"])
    if t.run.Engine.run_mode == "epoch":
        announced = t.length.max_steps
        t.length = t.length.resumed(t.run, facts["step"], _position(t, facts))
        t.metrics.max_steps = t.length.max_steps
        if t.length.max_steps != announced and t.mesh.is_first:  # another batch size
            size = t.run.Global.global_batch_size
            t.log.info(length_line(t.length.max_steps, size, t.splits.train.size))
    if _was_float16(facts):  # otherwise it has no loss scale: start with the configured one
        t.precision.restore(facts["scaler"])
    t.optimizer.loaded(facts["updates"])
    if facts["order"] != _order(t) and t.mesh.is_first:
        t.log.warn(
            "data, seed or number of epochs differ from the checkpoint: "
            "the order of samples changes"
        )


def _position(t: Training, facts: Facts) -> Position:
    """Where the run of a checkpoint was in its data."""
    if facts.get("position"):
        return Position(*facts["position"])
    # Earlier versions recorded only steps, all of which had batches of one size.
    before = facts["config"]
    if before["Engine"].get("run_mode") == "step":
        return t.length.position_of_sample(facts["samples"])
    epoch, batch = divmod(facts["step"], max(1, facts["steps_per_epoch"]))
    size = before["Global"].get("global_batch_size") or t.run.Global.global_batch_size
    return Position(epoch, batch, batch * size)


def _was_float16(facts: Facts) -> bool:
    found = facts["config"]
    for key in ("Engine", "mix_precision"):
        found = found.get(key) if isinstance(found, dict) else None
    return isinstance(found, dict) and bool(found.get("enable")) and found.get("dtype") == "float16"


def save(t: Training, checkpoints: Checkpoints, is_regular: bool) -> None:
    """Save a snapshot, or start a checkpoint, which is written in the background.

    Does nothing if this step is already saved.
    """
    if t.progress.step == checkpoints.saved_step:
        return
    t.events.add(SAVING, step=t.progress.step)
    began = time.perf_counter()
    with t.metrics.clock.stalled("save"):
        _save(t, checkpoints, is_regular)
    stall = round(time.perf_counter() - began, 3)
    t.events.add(CHECKPOINT, step=t.progress.step, stall=stall)


def _save(t: Training, checkpoints: Checkpoints, is_regular: bool) -> None:
    snapshot_path = t.run.Engine.save_load.snapshot_path
    if not snapshot_path:
        tensors, facts = t.optimizer.tensors(), _facts_of(t)
        checkpoints.save(t.progress.step, tensors, facts, is_waited_for=not is_regular)
    elif t.mesh.is_first:
        epoch, _ = t.length.epoch_and_batch(t.progress.step)
        try:
            # With the job: the jobs of a folder often share one snapshot.
            facts = {**_facts_of(t), "job": os.environ.get("GPTCTL_JOB")}
            save_snapshot(Path(snapshot_path), t.optimizer.tensors(), facts, epoch)
            checkpoints.saved_step, checkpoints.failure = t.progress.step, ""
            t.events.add(COMMITTED, step=t.progress.step)
            t.log.plain(
                f"Snapshot saved at epoch {epoch}"
                if is_regular
                else f"Save model to {snapshot_path}"
            )
        except OSError as error:
            checkpoints.failure = f"{snapshot_path}: {error.strerror}"
            t.log.warn(
                f"cannot save {snapshot_path}: {error.strerror}; the previous snapshot is kept"
            )


def _facts_of(t: Training) -> Facts:
    """Everything that a checkpoint records besides tensors."""
    return {
        "step": t.progress.step,
        "updates": t.progress.updates,
        "samples": t.progress.samples,
        "scaler": t.precision.state(),
        "order": _order(t),
        "steps_per_epoch": t.length.steps_per_epoch,
        "position": list(
            t.length.position(t.progress.step)
            if t.run.Engine.run_mode == "epoch"
            else t.length.position_of_sample(t.progress.samples)
        ),
        "layout": t.mesh.layout._asdict(),
        "vocabulary": t.splits.characters.vocabulary if t.splits.characters else None,
        "tokenizer": t.splits.tokenizer.tokenizer if t.splits.tokenizer else None,
        "torch": torch.__version__,
        "config": json.loads(json.dumps(asdict(t.run))),  # tuples become lists, as when loaded
    }


def _order(t: Training) -> list[int]:
    """The values that determine the order of samples."""
    train = t.run.Data.Train
    return [
        t.run.Global.seed,
        train.dataset.max_seq_len,
        train.sampler.shuffle,
        t.splits.train.size,
        t.splits.train.digest,
    ]


def _check_same_model(t: Training, facts: Facts, where: Path) -> None:
    """Raise UserError if a checkpoint belongs to another model, even if the shapes match."""
    if problem := _invalid_facts(t, facts):
        raise UserError(f"cannot load {where}: {problem}", "use a checkpoint of this program")
    different = model_differences(facts["config"]["Model"], asdict(t.run.Model))
    # With the same number of other characters, all shapes match, but the tokens mean other things.
    vocabulary = t.splits.characters.vocabulary if t.splits.characters else None
    # Nobody knows the characters of imported weights.
    is_known = has_optimizer(facts) or facts["vocabulary"] is not None
    if not different and is_known and facts["vocabulary"] != vocabulary:
        different = ["its vocabulary has different characters"]
    if not different and _is_other_tokenizer(t, facts):
        different = ["it was trained on data of another tokenizer"]
    if different:
        message = f"{where} is a checkpoint of another model: {'; '.join(different)}"
        raise UserError(
            message, "use the config of that run, or leave Engine.save_load.ckpt_dir empty"
        )


def _is_other_tokenizer(t: Training, facts: Facts) -> bool:
    """Whether checkpoint and data are known to come from different tokenizers."""
    own, saved = t.splits.tokenizer, facts.get("tokenizer")
    if own is None or not isinstance(saved, dict):
        return False
    return bool(saved.get("digest") != own.tokenizer["digest"])


def keep_tokenizer(t: Training) -> None:
    """Copy the files of the data's tokenizer to the output folder, for tasks with the model."""
    known, mesh = t.splits.tokenizer, t.mesh
    is_due = mesh.is_first or (os.environ.get(PRIVATE_DISKS, "0") != "0" and mesh.local_rank == 0)
    if known is None or not is_due:
        return
    beside = known.file.parent / FOLDER
    names = known.content["tokenizer"].get("files", ())
    try:
        copy_tokenizer([beside / Path(name).name for name in names], output_dir(t.run) / FOLDER)
    except OSError as error:
        t.log.warn(f"cannot copy the tokenizer {beside}: {error.strerror}")


def _invalid_facts(t: Training, facts: Facts) -> str:
    """What is missing or invalid in the facts, or an empty string.

    Checksums show only that a file is undamaged, not that this program wrote it.
    """
    expected = _facts_of(t)
    # Earlier versions recorded neither of these two.
    lacking = [key for key in expected if key not in (*facts, "position", "tokenizer")]
    if lacking:
        return f"{lacking[0]} is missing in its manifest"
    position = facts.get("position", [0, 0, 0])
    is_valid = {
        **{key: _is_count(facts[key]) for key in ("step", "updates", "samples", "steps_per_epoch")},
        "position": _are_counts(position) and len(position) == 3,
        "scaler": _is_scaler(facts["scaler"], expected["scaler"].keys()),
        "config": _is_config(facts["config"]),
    }
    wrong = [key for key, is_fine in is_valid.items() if not is_fine]
    return f"{wrong[0]} is invalid in its manifest" if wrong else ""


def _is_count(value: object) -> bool:
    """Not a bool, and not too large: the device counts updates in floats."""
    return type(value) is int and 0 <= value < MAX_COUNT


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


def _is_scaler(state: object, keys: Collection[str]) -> bool:
    return (
        isinstance(state, dict)
        and state.keys() == keys
        and all(type(value) in (int, float) for value in state.values())
        and 0 < state["scale"] < math.inf
        and 0 <= state["good_updates"] < MAX_COUNT
    )


def _is_config(config: object) -> bool:
    """Whether it has the sections that are compared with those of this run."""
    if not isinstance(config, dict):
        return False
    sections = [config.get(name) for name in ("Model", "Engine", "Global")]
    return all(isinstance(section, dict) for section in sections)
