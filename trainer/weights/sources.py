"""Weights of other programs on a disk: which files hold them, and what else these say.

Knows files and formats, not what the names of tensors mean.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.manifest import NAME as MANIFEST
from trainer.errors import WRONG_USAGE, UserError
from trainer.weights.export import ALONE, CONFIG, INDEX
from trainer.weights.pickles import flattened, load_pickle
from trainer.weights.safetensors_format import (
    FLOATS,
    Entry,
    Shape,
    read_header,
    read_tensor,
    shown,
)
from trainer.weights.source_files import (
    HINT,
    exists,
    explained,
    open_source,
    read_json,
    read_source,
)

SAFETENSORS, PICKLES = ".safetensors", (".bin", ".pt", ".pth")
OLD_ALONE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MEGATRON_FILE = Path("mp_rank_00", "model_optim_rng.pt")
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
VERSION = "checkpoint_version"  # of Megatron
# nanoGPT's and Megatron's names of what config.json of Hugging Face says.
NANOGPT_KEYS = {"block_size": "n_positions", "dropout": "resid_pdrop"}
MEGATRON_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "ffn_hidden_size": "n_inner",
    "padded_vocab_size": "vocab_size",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "layernorm_epsilon": "layer_norm_epsilon",
}


class Stored(NamedTuple):
    """A tensor that can be read."""

    shape: Shape
    is_float: bool
    read: Callable[[], Tensor]


class Source(NamedTuple):
    where: Path
    tensors: dict[str, Stored]
    config: dict[str, Any]  # as in config.json
    config_place: str  # where it is from, for messages
    version: float | None  # of a Megatron checkpoint
    size: int  # bytes of all files


def open_weights(where: Path) -> Source:
    """Open a folder or a file. Raises UserError."""
    if not os.path.exists(where):
        raise UserError(f"{where} does not exist", HINT, WRONG_USAGE)
    files = _files(where)
    folder = where if where.is_dir() else where.parent
    tensors: dict[str, Stored] = {}
    config, place, version = dict[str, Any](), "", None
    for file in files:
        found = _opened(file)
        for name in found.tensors.keys() & tensors.keys():
            raise UserError(f"cannot import {where}: two files contain {shown(name)}", HINT)
        tensors |= found.tensors
        config, place = {**config, **found.config}, found.config_place or place
        version = found.version if version is None else version
    if exists(folder / CONFIG):
        config, place = read_json(folder / CONFIG), str(folder / CONFIG)
    size = sum(file.stat().st_size for file in files)
    return Source(where, tensors, config, place, version, size)


def _files(where: Path) -> list[Path]:
    """The files that hold the weights."""
    if not where.is_dir():
        return [where]
    if exists(where / MANIFEST):
        message = f"{where} is a checkpoint of this program already"
        raise UserError(message, "set Engine.save_load.ckpt_dir to it")
    for index, alone in ((INDEX, ALONE), (OLD_INDEX, OLD_ALONE)):
        if exists(where / index):
            return _listed(where, where / index)
        if exists(where / alone):
            return [where / alone]
    if exists(where / MEGATRON_LATEST):
        where = _newest_of_megatron(where)
    if exists(where / MEGATRON_FILE):
        return [_only_part(where)]
    return [_only_one(where)]


def _listed(folder: Path, index: Path) -> list[Path]:
    """The files of an index. It must not lead out of its folder."""
    names = read_json(index).get("weight_map")
    files = set(names.values()) if isinstance(names, dict) and _are_texts(names.values()) else set()
    is_plain = all(os.path.basename(name) == name and name not in ("", "..") for name in files)
    if not files or not is_plain or any("\0" in name for name in files):
        raise UserError(f"cannot import {index}: it does not list files of its folder", HINT)
    return [folder / name for name in sorted(files)]


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _newest_of_megatron(folder: Path) -> Path:
    """The folder of the iteration that Megatron has noted, such as iter_0001000."""
    text = read_source(folder / MEGATRON_LATEST, 100).decode(errors="replace").strip()
    is_number = re.fullmatch("[0-9]{1,12}", text)
    name = f"iter_{int(text):07}" if is_number else "release"
    if not (is_number or text == name) or not (folder / name).is_dir():
        message = f"{folder / MEGATRON_LATEST} names {shown(text)}, which is missing"
        raise UserError(message, HINT)
    return folder / name


def _only_part(folder: Path) -> Path:
    parts = sorted(entry.name for entry in folder.glob("mp_rank_*"))
    if len(parts) > 1:
        message = f"{folder} is split over {len(parts)} ranks: {', '.join(parts[:4])}"
        raise UserError(message, "merge it with Megatron's tools/checkpoint/convert.py first")
    return folder / MEGATRON_FILE


def _only_one(folder: Path) -> Path:
    for suffixes in ((SAFETENSORS,), PICKLES):
        found = sorted(entry for entry in folder.iterdir() if entry.suffix in suffixes)
        if len(found) > 1:
            names = ", ".join(shown(file.name) for file in found[:4])
            raise UserError(f"{folder} contains several files: {names}", "name one of them")
        if found:
            return found[0]
    raise UserError(f"{folder} contains no weights", HINT)


def _opened(file: Path) -> Source:
    if file.suffix == SAFETENSORS:
        return _open_safetensors(file)
    if file.suffix in PICKLES:
        return _open_pickle(file)
    raise UserError(f"{file} is not a file with weights", HINT)


def _open_safetensors(file: Path) -> Source:
    with explained(file):
        # Stays open until the tensors are read: the file of this name could be replaced meanwhile.
        stream = open(open_source(file), "rb", buffering=0)  # noqa: SIM115
        header = read_header(stream.fileno())

    def read(entry: Entry) -> Tensor:
        with explained(file):
            return read_tensor(stream.fileno(), entry)

    tensors = {
        name: Stored(entry.shape, entry.dtype in FLOATS, partial(read, entry))
        for name, entry in header.entries.items()
    }
    return Source(file, tensors, {}, "", _number(header.metadata.get(VERSION)), 0)


def _open_pickle(file: Path) -> Source:
    content = load_pickle(file)
    with explained(file):
        tensors = dict(flattened(_weights_in(content)))
    stored = {
        name: Stored(tuple(tensor.shape), tensor.dtype in FLOATS.values(), tensor.contiguous)
        for name, tensor in tensors.items()
    }
    config = dict(_config_in(content))
    # Megatron's first version did not record it.
    version = _number(content.get(VERSION, 0.0))
    return Source(file, stored, config, str(file) if config else "", version, 0)


def _weights_in(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The dictionary of weights among the other things that a training saves."""
    for key in ("model", "state_dict"):
        inner = content.get(key)
        if isinstance(inner, dict):
            return inner
    # The state of an optimizer has tensors, too.
    return {key: value for key, value in content.items() if key != "optimizer"}


def _config_in(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    arguments = content.get("model_args")
    if isinstance(arguments, dict):
        for key, value in arguments.items():
            yield NANOGPT_KEYS.get(key, str(key)), value
        if "dropout" in arguments:
            yield "attn_pdrop", arguments["dropout"]
    namespace = content.get("args")
    if isinstance(namespace, argparse.Namespace):
        for key, name in MEGATRON_KEYS.items():
            if getattr(namespace, key, None) is not None:
                yield name, getattr(namespace, key)
        is_exact = not (_is_on(namespace, "bias_gelu_fusion") or _is_on(namespace, "openai_gelu"))
        yield "activation_function", "gelu" if is_exact else "gelu_new"


def _is_on(namespace: argparse.Namespace, name: str) -> bool:
    return getattr(namespace, name, False) is True


def _number(value: object) -> float | None:
    """A version, which metadata of safetensors have as text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None
