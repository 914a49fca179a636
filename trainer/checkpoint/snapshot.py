"""minGPT's snapshot: the whole state in one file, written by the first rank and read by all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.signing import SIGNATURE_HINT, current_keys, is_about_signature
from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import explain, open_regular, parse_exactly
from trainer.slices import Piece

_KIND = "snapshot"  # of signature
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_snapshot(
    file: Path, pieces: dict[str, Piece], facts: dict[str, Any], finished_epoch: int
) -> None:
    """Write a snapshot. It is signed if this run has a key."""
    # Whole tensors, not parts of them: rule T011 refuses snapshots in other layouts.
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    checksum = _checksum(tensors, facts, finished_epoch)
    content = {
        "model_state": _under(tensors, "model."),
        "optimizer_state": {moment: _under(tensors, f"optim.{moment}.") for moment in _MOMENTS},
        "finished_epoch": finished_epoch,
        "facts": json.dumps(facts),  # as text: weights_only allows few types
        "checksum": checksum,
    }
    if keys := current_keys():
        content["signature"] = keys.signature(_KIND, _signed_text(tensors, checksum))
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        torch.save(content, stream)


class _Content(NamedTuple):
    """What a snapshot contains, and why it must not be used, if it must not."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    finished_epoch: int
    problem: str


def load_snapshot(
    file: Path, pieces: dict[str, Piece], check: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], int]:
    """Load a snapshot into the pieces, after `check` accepted its facts.

    Returns the facts and the number of finished epochs.
    """
    hint = "delete it to train from scratch, or set another Engine.save_load.snapshot_path"
    try:
        with open(open_regular(file), "rb") as stream:
            content = _read(stream)
    except OSError as error:
        raise UserError(explain(str(file), error), hint) from None
    except Exception:  # damaged and foreign files make torch raise anything
        message = f"cannot use {file}: it is not a snapshot of this program"
        raise UserError(message, hint) from None
    if content.problem:
        if is_about_signature(content.problem):  # it may be intact: nobody should delete it
            hint = f"{SIGNATURE_HINT}; or set another Engine.save_load.snapshot_path"
        raise UserError(f"cannot use {file}: {content.problem}", hint)
    stored = content.tensors
    check(content.facts)  # before any tensor is changed
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if shapes != {name: tuple(piece.tensor.shape) for name, piece in pieces.items()}:
        raise UserError(f"{file} is a snapshot of another model", hint)
    for name, piece in pieces.items():
        piece.tensor.copy_(stored[name])
    return content.facts, content.finished_epoch


def _read(stream: BinaryIO) -> _Content:
    content = torch.load(stream, map_location="cpu", weights_only=True)  # never runs code
    stored = {f"model.{name}": tensor for name, tensor in content["model_state"].items()}
    for moment in _MOMENTS:
        states = content["optimizer_state"][moment]
        stored |= {f"optim.{moment}.{name}": tensor for name, tensor in states.items()}
    # A few bytes can describe a tensor of any size, all of it the same element.
    if sum(tensor.nbytes for tensor in stored.values()) > os.fstat(stream.fileno()).st_size:
        raise ValueError("its tensors are larger than the file")
    facts, finished = parse_exactly(content["facts"]), int(content["finished_epoch"])
    checksum = _checksum(stored, facts, finished)
    problem = "it is damaged: wrong checksum" if content["checksum"] != checksum else ""
    signed = _signed_text(stored, checksum)
    problem = problem or current_keys().objection(content.get("signature"), _KIND, signed)
    return _Content(stored, facts, finished, problem)


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


def _signed_text(tensors: dict[str, Tensor], checksum: str) -> bytes:
    """Everything that is loaded: the checksum, and what it does not cover, types and shapes."""
    kinds = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    return json.dumps([checksum, kinds], sort_keys=True).encode()
