"""minGPT's snapshot: the whole state in one file, written by the first rank and read by all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.durable import replacing
from trainer.errors import UserError
from trainer.slices import Piece

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_snapshot(
    file: Path, pieces: dict[str, Piece], facts: dict[str, Any], finished_epoch: int
) -> None:
    # Whole tensors, not parts of them: rule T011 refuses snapshots in other layouts.
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    content = {
        "model_state": _under(tensors, "model."),
        "optimizer_state": {moment: _under(tensors, f"optim.{moment}.") for moment in _MOMENTS},
        "finished_epoch": finished_epoch,
        "facts": json.dumps(facts),  # as text: weights_only allows few types
        "checksum": _checksum(tensors, facts, finished_epoch),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        torch.save(content, stream)


def load_snapshot(
    file: Path, pieces: dict[str, Piece], check: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], int]:
    """Load a snapshot into the pieces, after `check` accepted its facts.

    Returns the facts and the number of finished epochs.
    """
    hint = "delete it to train from scratch, or set another Engine.save_load.snapshot_path"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)  # never runs code
        stored = {f"model.{name}": tensor for name, tensor in content["model_state"].items()}
        for moment in _MOMENTS:
            states = content["optimizer_state"][moment]
            stored |= {f"optim.{moment}.{name}": tensor for name, tensor in states.items()}
        facts, finished = json.loads(content["facts"]), int(content["finished_epoch"])
        whole = content["checksum"] == _checksum(stored, facts, finished)
    except Exception as error:  # damaged and foreign files make torch raise anything
        reason = "it is not a snapshot of this program"
        if isinstance(error, OSError):
            reason = str(error).splitlines()[0]
        raise UserError(f"cannot use {file}: {reason}", hint) from None
    if not whole:
        raise UserError(f"{file} is damaged: wrong checksum", hint)
    check(facts)  # before any tensor is changed
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if shapes != {name: tuple(piece.tensor.shape) for name, piece in pieces.items()}:
        raise UserError(f"{file} is a snapshot of another model", hint)
    for name, piece in pieces.items():
        piece.tensor.copy_(stored[name])
    return facts, finished


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor.cpu()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _checksum(tensors: dict[str, Tensor], facts: dict[str, Any], finished_epoch: int) -> str:
    digest = hashlib.sha256(json.dumps([facts, finished_epoch], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
