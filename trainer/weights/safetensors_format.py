"""Reads and writes safetensors files one tensor at a time.

A header may be crafted: it is used only if its tensors fill the file exactly, one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.tensor_files import raw_bytes
from trainer.input_files import parse_object
from trainer.weights.source_files import CutOff

Shape = tuple[int, ...]
LENGTH_BYTES, ALIGNMENT = 8, 64
LARGEST_HEADER = 1 << 24  # bytes; that of a GPT with a hundred layers has 150,000
METADATA = "__metadata__"
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
# Masks of old files have these types: they are never read, but their size is checked.
_SIZES = {
    **{name: dtype.itemsize for name, dtype in FLOATS.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16"), 2),
    **dict.fromkeys(("U32", "I32"), 4),
    **dict.fromkeys(("U64", "I64"), 8),
}


class Entry(NamedTuple):
    """A tensor in a file: its bytes are between two places."""

    dtype: str
    shape: Shape
    begin: int
    end: int


class Header(NamedTuple):
    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(descriptor: int) -> Header:
    """Read and check the header of an open file. Raises ValueError."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    start = LENGTH_BYTES + length
    if size < LENGTH_BYTES or start > size:
        raise CutOff("it is not a safetensors file, or it is cut off")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header has {length} bytes, at most {LARGEST_HEADER} expected")
    header = parse_object(os.pread(descriptor, length, LENGTH_BYTES))
    metadata = header.pop(METADATA, {})
    entries = {name: _entry(name, facts, start) for name, facts in header.items()}
    _require_filled(entries, start, size)
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return Header(entries, {key: text for key, text in texts if isinstance(text, str)})


def _entry(name: str, facts: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
        numbers = [begin, end, *shape]
        is_valid = all(type(number) is int and number >= 0 for number in numbers)
        # In Python's integers, which do not overflow however large the dimensions are.
        is_valid = is_valid and math.prod(shape) * _SIZES[dtype] == end - begin
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"its header does not describe {shown(name)} correctly")
    return Entry(dtype, shape, start + begin, start + end)


def _require_filled(entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Raise unless the tensors fill the file: neither overlaps nor gaps, nor bytes after them."""
    place = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != place:
            raise ValueError("its tensors overlap, or have gaps between them")
        place = entry.end
    if place != size:
        kind = CutOff if size < place else ValueError
        raise kind(f"its tensors end at byte {place}, but it has {size} bytes")


def read_tensor(descriptor: int, entry: Entry) -> Tensor:
    """Read a tensor of floats. Raises ValueError if the file ends before it."""
    tensor = torch.empty(entry.shape, dtype=FLOATS[entry.dtype])
    memory, place = raw_bytes(tensor), entry.begin
    while place < entry.end:
        count = os.preadv(descriptor, [memory[place - entry.begin :]], place)
        if not count:
            raise CutOff("it was cut off while it was read")
        place += count
    return tensor


def write_tensors(
    file: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, tensors: Iterable[Tensor]
) -> None:
    """Write a file, and wait until it is on disk. The tensors come in the order of `shapes`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write(descriptor, memoryview(_header(shapes, dtype)))
        # Not zip: its last pair would keep a tensor while the next one is made.
        waiting = iter(shapes.values())
        for tensor in tensors:
            assert tuple(tensor.shape) == next(waiting)
            assert tensor.dtype == dtype
            _write(descriptor, raw_bytes(tensor))
        assert not list(waiting)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    content: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers refuses a file without
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view[: 1 << 24]) :]


def shown(name: str) -> str:
    """A name from a file, for a message: short, and without control characters."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


def shards(shapes: Mapping[str, Shape], itemsize: int, limit: int) -> Iterator[dict[str, Shape]]:
    """Divide tensors into files of at most so many bytes, in their order; each has at least one."""
    shard: dict[str, Shape] = {}
    size = 0
    for name, shape in shapes.items():
        length = math.prod(shape) * itemsize
        if shard and size + length > limit:
            yield shard
            shard, size = {}, 0
        shard[name], size = shape, size + length
    yield shard
