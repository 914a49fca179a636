"""Writes weights as GPT-2 in the format of Hugging Face, one tensor after the other.

At most one tensor and its converted copy are in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.weights.checkpoint_weights import EMBEDDING, CheckpointWeights
from trainer.weights.families import hugging_face_name
from trainer.weights.gpt2_config import config_json, generation_config_json
from trainer.weights.new_folder import MARKER, new_folder
from trainer.weights.orders import MATRICES, to_hugging_face
from trainer.weights.progress import Progress
from trainer.weights.safetensors_format import Shape, shards, write_tensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALONE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


class Target(NamedTuple):
    """What to write, and where."""

    output: Path
    dtype: str
    largest_file: int  # bytes
    end: int | None  # the token after a document
    texts: dict[str, bytes]  # more files: the tokenizer


def export(weights: CheckpointWeights, target: Target, check_stop: Callable[[], None]) -> list[str]:
    """Write the folder. Returns the names of its files."""
    shapes = {name: _shape_there(weights, name) for name in weights.shapes}
    itemsize = DTYPES[target.dtype].itemsize
    size = sum(map(math.prod, shapes.values())) * itemsize
    progress = Progress("exported", size)
    with new_folder(target.output, size) as folder:
        parts = list(shards(shapes, itemsize, target.largest_file))
        for number, part in enumerate(parts, 1):
            tensors = _tensors(weights, part, target.dtype, progress, check_stop)
            _write_part(folder / _file_name(number, len(parts)), part, target.dtype, tensors)
        if len(parts) > 1:
            _write_json(folder / INDEX, _index(parts, size))
        _write_configs(folder, weights, target)
        names = sorted({entry.name for entry in folder.iterdir()} - {MARKER})
    progress.close()
    return names


def _shape_there(weights: CheckpointWeights, name: str) -> Shape:
    shape = weights.shapes[name]
    if name == EMBEDDING:
        assert weights.model.vocab_size is not None
        return (weights.model.vocab_size, shape[1])
    return shape[::-1] if name.endswith(MATRICES) else shape


def _tensors(
    weights: CheckpointWeights,
    names: Iterable[str],
    dtype: str,
    progress: Progress,
    check_stop: Callable[[], None],
) -> Iterator[Tensor]:
    heads = weights.model.num_attention_heads
    for name in names:
        check_stop()
        # Nested, so that nothing keeps the tensor while the next one is read.
        tensor = _rounded(to_hugging_face(name)(weights.read(name), heads), dtype, name)
        progress.add(tensor.nbytes)
        yield tensor
        del tensor


def _rounded(tensor: Tensor, dtype: str, name: str) -> Tensor:
    rounded = tensor.to(DTYPES[dtype])
    # 65504 is the largest number of float16: a larger weight would become infinite.
    if dtype == "float16" and rounded.isinf().any() and not tensor.isinf().any():
        hint = "use --dtype bfloat16, or float32"
        raise UserError(f"{name} has values that float16 cannot represent", hint)
    return rounded


def _write_part(file: Path, part: dict[str, Shape], dtype: str, tensors: Iterator[Tensor]) -> None:
    named = {hugging_face_name(name): shape for name, shape in part.items()}
    write_tensors(file, named, DTYPES[dtype], tensors)


def _file_name(number: int, total: int) -> str:
    return ALONE if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"


def _index(parts: list[dict[str, Shape]], size: int) -> dict[str, Any]:
    files = {
        hugging_face_name(name): _file_name(number, len(parts))
        for number, part in enumerate(parts, 1)
        for name in part
    }
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}


def _write_configs(folder: Path, weights: CheckpointWeights, target: Target) -> None:
    _write_json(folder / CONFIG, config_json(weights.model, target.end, target.dtype))
    _write_json(folder / GENERATION_CONFIG, generation_config_json(target.end))
    for name, text in target.texts.items():
        (folder / name).write_bytes(text)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
