"""Find the checkpoint that a verb works on: a path, or a job, whose newest verified one is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.backends import Backends
from gptctl.engine.file_reading import DamagedFile, load_json, read_json
from gptctl.engine.run_folder import checkpoint_steps
from gptctl.jobs.store import JobRecord, Store
from trainer.checkpoint_names import MANIFEST, STEP, is_damaged, is_verified
from trainer.checksums import LARGEST_MANIFEST
from trainer.errors import WRONG_USAGE, UserError


class TrainedModel(NamedTuple):
    """A checkpoint, the config that it was trained with, and the job that wrote it, if known."""

    folder: str
    config: Mapping[str, Any]
    origin: str  # the file that contains the config
    record: JobRecord | None = None
    is_here: bool = True  # False: it is on hosts that share no folder with this machine


def find_model(name: str, step: int | None, store: Store, backends: Backends) -> TrainedModel:
    """Find a checkpoint by the path of it or of a folder of checkpoints, or else by a job."""
    # A path first: `./gpt` must not become a job of that name.
    if os.path.lexists(name):
        if record := _hidden_job(name, store):
            hint = f"for the job, start in another folder, or name {record.output_dir}"
            message = f"{name} here contains no checkpoint, and hides the job {record.id}"
            raise UserError(message, hint, WRONG_USAGE)
        return _opened(_checkpoint_at(Path(name), step))
    if "/" in name:
        raise UserError(f"{name} does not exist", "check the path", WRONG_USAGE)
    try:
        record = store.find(name)
    except UserError as error:
        message = f"{name} is neither a path nor a job: {error.message}"
        raise UserError(message, "`gptctl list --all` shows your jobs", WRONG_USAGE) from None
    if not record.output_dir:
        hint = "name a job of the bundled trainer, or the path of a checkpoint"
        raise UserError(f"{record.id} did not run the bundled trainer", hint, WRONG_USAGE)
    folder = Path(record.output_dir)
    if folder.is_dir() and _steps_in(folder):
        return _opened(_checkpoint_at(folder, step))._replace(record=record)
    if record.remote_dir in ("", record.local_dir):
        hint = f"see how far it is: gptctl status {record.id}"
        raise UserError(f"{record.id} has no checkpoint in {folder}", hint)
    return on_hosts(record, step, backends)


def _hidden_job(name: str, store: Store) -> JobRecord | None:
    """The job that a user may mean by the name of a path without checkpoints."""
    path = Path(name)
    if "/" in name or (path / MANIFEST).exists() or (path.is_dir() and _steps_in(path)):
        return None
    try:
        return store.find(name)
    except UserError:
        return None


def on_hosts(record: JobRecord, step: int | None, backends: Backends) -> TrainedModel:
    """The checkpoint of a job where its hosts have it."""
    place, names = backends.of(record.kind).checkpoints(record)
    steps = sorted(checkpoint_steps(names))
    if not steps:
        hint = f"see how far it is: gptctl status {record.id}"
        raise UserError(f"{record.id} has no checkpoint in {place} on its hosts", hint)
    chosen = steps[-1] if step is None else _require_step(step, steps, place)
    origin = record.run_folder / "config.json"
    config = (read_json(origin) or {}).get("resolved")
    if not isinstance(config, Mapping):
        raise UserError(f"{origin} is missing or damaged", "name the path of a checkpoint instead")
    return TrainedModel(f"{place}/step_{chosen}", config, str(origin), record, is_here=False)


def _checkpoint_at(path: Path, step: int | None) -> Path:
    """The checkpoint itself, or the newest of a folder, or that of one step."""
    if (path / MANIFEST).exists():
        named = STEP.fullmatch(path.resolve().name)
        if step is not None and (not named or int(named[1]) != step):
            hint = "omit --step, or name the folder of all checkpoints"
            raise UserError(f"{path} is not the checkpoint of step {step}", hint, WRONG_USAGE)
        return path
    steps = _steps_in(path) if path.is_dir() else []
    if not steps:
        raise UserError(f"{path} contains no checkpoint", _what_else(path), WRONG_USAGE)
    if step is None:
        return _newest(path, steps)
    return path / f"step_{_require_step(step, steps, str(path))}"


def _require_step(step: int, steps: list[int], place: str) -> int:
    if step not in steps:
        hint = f"it has the steps {', '.join(map(str, sorted(steps)))}"
        raise UserError(f"{place} has no checkpoint of step {step}", hint, WRONG_USAGE)
    return step


def _what_else(path: Path) -> str:
    # Weights of other programs can be imported; a checkpoint has an index of its own.
    if any((path / name).exists() for name in ("config.json", "model.safetensors")):
        return f"for weights of another program: gptctl import {path} --output NEW_FOLDER"
    return f"a checkpoint is a folder such as output/step_1000, with a {MANIFEST}"


def _steps_in(folder: Path) -> list[int]:
    try:
        return [
            step
            for step in checkpoint_steps(os.listdir(folder))
            if (folder / f"step_{step}" / MANIFEST).exists()
        ]
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}", "check its mode") from None


def _newest(folder: Path, steps: list[int]) -> Path:
    """The newest checkpoint that was read back correctly after it had been written."""
    newest_first = [folder / f"step_{step}" for step in sorted(steps, reverse=True)]
    verified = [each for each in newest_first if is_verified(each) and not is_damaged(each)]
    # A run that was killed verified nothing: what reads the checkpoint verifies it then.
    undamaged = [each for each in newest_first if not is_damaged(each)]
    return next(iter([*verified, *undamaged, *newest_first]))


def _opened(folder: Path) -> TrainedModel:
    file = folder / MANIFEST
    try:
        config = load_json(file, LARGEST_MANIFEST).get("config")
    except (OSError, DamagedFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {file}: {reason}", "use another checkpoint") from None
    if not isinstance(config, Mapping) or not isinstance(config.get("Model"), Mapping):
        raise UserError(f"{file} contains no config", "use a checkpoint of the bundled trainer")
    return TrainedModel(os.path.abspath(folder), config, str(file))
