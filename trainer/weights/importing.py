"""Writes matched weights as a checkpoint of this program: step 0, without optimizer state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manifest import find_damage, read_manifest, write_manifest
from trainer.checkpoint.store import Store
from trainer.checkpoint.tensor_files import Written, file_name, tensor_index, write_pieces
from trainer.checkpoint.verification import record_all
from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.layout import Layout
from trainer.slices import whole
from trainer.weights.checkpoint_weights import EMBEDDING, PREFIX
from trainer.weights.families import Family
from trainer.weights.matching import Matched
from trainer.weights.progress import Progress
from trainer.weights.safetensors_format import shown

GROUP = 1 << 28  # bytes of tensors that are written to one file
FLOAT_BYTES = 4
# What an earlier import that was killed may have left.
LEFT_BEHIND = {".lock", ".owner", "step_0.tmp", "tokenizer"}


def require_new(output: Path) -> None:
    """Raise UserError unless the folder is new, empty, or left by an import that was killed."""
    if os.path.lexists(output) and not output.is_dir():
        raise UserError(f"{output} exists, and is not a folder", "use another --output")
    if output.is_dir() and {entry.name for entry in output.iterdir()} - LEFT_BEHIND:
        raise UserError(f"{output} exists, and is not empty", "use another --output, or delete it")


def require_tied(matched: Matched) -> None:
    """Raise UserError if the output matrix is not the embedding: this model has only one."""
    rows = matched.run.Model.vocab_size
    for name in matched.heads:
        head, embedding = matched.source.tensors[name].read(), matched.stored[EMBEDDING].read()
        if not torch.equal(head[:rows], embedding[:rows]):
            message = f"cannot import {matched.source.where}: {shown(name)} is not the embedding"
            raise UserError(message, "this model has one matrix for both: train with tied weights")


def write_checkpoint(
    matched: Matched, output: Path, facts: dict[str, Any], check_stop: Callable[[], None]
) -> Path:
    """Write `output/step_0`. Returns its path. Raises UserError, OSError."""
    store = Store(output)
    store.open_for_writing(lambda text: None)
    part = store.part(0)
    try:
        store.require_space(FLOAT_BYTES * sum(_numel(shape) for shape in matched.shapes.values()))
        part.mkdir()
        _write_files(matched, part, facts, check_stop)
        store.commit(part)
        folder = part.with_suffix("")
        _verify(folder)
        return folder
    except BaseException:
        store.discard(part)
        raise
    finally:
        store.close()


def _write_files(
    matched: Matched, part: Path, facts: dict[str, Any], check_stop: Callable[[], None]
) -> None:
    written: dict[str, Written] = {}
    for number, group in enumerate(_groups(matched, check_stop)):
        name = file_name(number)
        written[name] = write_pieces(part / name, whole(group))
    tensors = tensor_index({name: file.tensors for name, file in written.items()})
    files = {name: file.facts for name, file in written.items()}
    write_manifest(part, {**facts, "tensors": tensors}, files)  # signed, if there is a key


def _groups(matched: Matched, check_stop: Callable[[], None]) -> Iterator[dict[str, Tensor]]:
    """Read the weights, a few at a time, so that a large model needs little memory."""
    group: dict[str, Tensor] = {}
    total = sum(_numel(shape) for shape in matched.shapes.values()) * FLOAT_BYTES
    progress = Progress("imported", total)
    for name, shape in matched.shapes.items():
        check_stop()
        if group and _bytes(group) + FLOAT_BYTES * _numel(shape) > GROUP:
            yield group
            group = {}
        tensor = matched.read(name)
        if not tensor.isfinite().all():
            message = f"cannot import {matched.source.where}: {name} contains NaN or infinity"
            raise UserError(message, "use weights of a training that went well")
        group[f"{PREFIX}{name}"] = tensor
        progress.add(tensor.nbytes)
        del tensor
    progress.close()
    yield group


def _bytes(group: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in group.values())


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _verify(folder: Path) -> None:
    """Read back what was written, so that nobody has to do it again."""
    files = read_manifest(folder)["files"]
    if damage := find_damage(folder, files.items()):
        raise UserError(f"{folder} cannot be read back: {damage}", "check the disk")
    record_all(folder, files)


def facts_of(
    run: RunConfig, source: Path, family: Family, tokenizer: dict[str, Any] | None
) -> dict[str, Any]:
    """What a checkpoint records besides tensors, for one that no training wrote."""
    return {
        **dict.fromkeys(("step", "updates", "samples", "steps_per_epoch"), 0),
        "has_optimizer": False,
        "imported": {"from": source.name, "names": family.name},
        "scaler": {"scale": run.Engine.mix_precision.scale_loss, "good_updates": 0},
        "order": [],
        "position": [0, 0, 0],
        "layout": Layout()._asdict(),
        "vocabulary": None,
        "tokenizer": tokenizer,
        "torch": torch.__version__,
        "config": json.loads(json.dumps(asdict(run))),
    }
