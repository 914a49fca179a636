"""Reads the tensors of a `*.bin` or `*.pt` file with torch's `weights_only`: no code in it can run.

Training states contain more than tensors. What they need beyond `weights_only` is only the
namespace of arguments that Megatron saves; anything else is refused.
"""

from __future__ import annotations

import argparse
import pickle  # nosec B403  # only for the name of its exception
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.weights.safetensors_format import shown
from trainer.weights.source_files import explained, open_source

DEEPEST = 8  # levels of dictionaries; Megatron has five
SAFER = (
    "save only the weights where you trust the file, with safetensors.torch.save_file, "
    "and import that file"
)


def load_pickle(file: Path) -> dict[Any, Any]:
    """The dictionary in a file. Its tensors stay on the disk until they are used."""
    with explained(file):
        descriptor = open_source(file)
        with open(descriptor, "rb") as stream:
            is_zip = zipfile.is_zipfile(stream)
            if is_zip:
                _require_plain(stream)
            stream.seek(0)
            # By its descriptor: under its name there could be another file by now.
            place = f"/proc/self/fd/{descriptor}" if is_zip else stream
            content = _load(file, place, is_zip)
    if not isinstance(content, dict):
        raise UserError(f"cannot import {file}: it contains no dictionary of tensors", SAFER)
    return content


def _load(file: Path, place: str | BinaryIO, is_zip: bool) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions of the format that it can read
            return torch.load(place, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it contains {named[1]}" if named else "it is not a file of torch.save"
        message = f"cannot import {file}: {what}; only tensors are read, nothing is executed"
        raise UserError(message, SAFER) from None
    except OSError:
        raise UserError(f"cannot import {file}: it is cut off, or damaged", SAFER) from None
    except Exception as error:  # damaged and crafted files make torch raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"cannot import {file}: {reason}", SAFER) from None


def _require_plain(stream: BinaryIO) -> None:
    """Raise ValueError for a compressed archive: torch writes none, and it could be a bomb."""
    try:
        with zipfile.ZipFile(stream) as archive:
            kinds = {entry.compress_type for entry in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise ValueError(f"damaged archive: {error}") from None
    if kinds - {zipfile.ZIP_STORED}:
        raise ValueError("it is a compressed archive, not a file of torch.save")


def flattened(content: dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[Any]:
    """Names and tensors of nested dictionaries: `language_model.embedding...`."""
    if depth > DEEPEST:
        raise ValueError(f"its dictionaries are nested more than {DEEPEST} levels deep")
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", _plain(f"{prefix}{key}", value)


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is stored as it is. A few bytes can describe one of any size."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(f"{shown(name)} is not a plain tensor")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{shown(name)} is larger than what is stored of it")
    return tensor.detach()
