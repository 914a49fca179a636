"""Loads pieces from the tensor files of a checkpoint, in whatever layout they were saved.

Every rank reads only the blocks that contain something of its own pieces, and uses a block only
after its checksum was verified. The manifest may be crafted: nothing in it is used before it was
compared with the expected tensors and with the files.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.tensor_files import DTYPES, raw_bytes
from trainer.checksums import Block, FileFacts, opened, read_block, read_table
from trainer.mesh import machines
from trainer.slices import Piece, Slice

Shape = tuple[int, ...]
Range = tuple[int, int]  # the first element, and how many
READERS = 4  # threads at most: some wait for the disk while others compute checksums


class Untrusted(Exception):
    """The checkpoint contains something that our checkpoints never contain."""


class Stored(NamedTuple):
    """A piece in a file."""

    file: str
    begin: int
    at: Slice
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.at.row_numel * self.dtype.itemsize


class Part(NamedTuple):
    """Rows of a stored piece that are in a block, and the piece that wants some of them."""

    begin: int  # in the block, in bytes
    at: Slice
    dtype: torch.dtype
    target: Piece


Index = dict[str, list[Stored]]
Tasks = dict[int, list[Part]]  # by the number of the block


def load_pieces(
    folder: Path, manifest: dict[str, Any], pieces: dict[str, Piece], shapes: dict[str, Shape]
) -> None:
    """Load the pieces. The checkpoint must contain exactly the tensors in `shapes`.

    Raises ValueError for a checkpoint of another model, Untrusted for a crafted one, and Damaged.
    """
    load_indexed(folder, manifest, read_index(manifest, shapes), pieces)


def load_indexed(
    folder: Path, manifest: dict[str, Any], index: Index, pieces: dict[str, Piece]
) -> None:
    """Load the pieces by an index that was read before: for callers that load in many steps."""
    needed: dict[str, list[tuple[Stored, Piece]]] = defaultdict(list)
    for name, piece in pieces.items():
        # A rank may hold an empty piece of a small parameter: there is nothing to load.
        target = _with_rows(piece)
        for stored in index[name] if target.at.numel else []:
            if stored.at.overlap(target.at):
                needed[stored.file].append((stored, target))
    for file in sorted(needed):
        _load_file(folder / file, manifest["files"][file], needed[file])


def _load_file(file: Path, facts: FileFacts, needed: list[tuple[Stored, Piece]]) -> None:
    with opened(file) as descriptor:
        blocks = read_table(descriptor, file.name, facts)
        tasks = _tasks(blocks, needed)
        numbers = sorted(tasks)  # in the order of the file, which disks read fastest
        scratch: SimpleQueue[Tensor] = SimpleQueue()
        largest = max(blocks[number].length for number in numbers)  # not more than the file has
        on_gpu = any(piece.tensor.is_cuda for _, piece in needed)
        num_readers = min(_readers(), len(numbers))
        for _ in range(num_readers):
            scratch.put(torch.empty(largest, dtype=torch.uint8, pin_memory=on_gpu))

        def load(number: int) -> None:
            memory = scratch.get()
            try:
                read_block(descriptor, file.name, blocks[number], raw_bytes(memory))
                for part in tasks[number]:
                    _copy(memory, part)
            finally:
                scratch.put(memory)

        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        with ThreadPoolExecutor(num_readers) as readers:
            try:
                for _ in readers.map(load, numbers):
                    pass
            except BaseException:
                readers.shutdown(cancel_futures=True)
                raise


def _readers() -> int:
    """The number of threads that read a file.

    If the ranks of this node have no core to spare, more of them only take turns: the system reads
    ahead less for each, and the blocks of all do not fit into the caches.
    """
    return min(READERS, 1 + len(os.sched_getaffinity(0)) // machines().per_node)


def _tasks(blocks: list[Block], needed: list[tuple[Stored, Piece]]) -> Tasks:
    """Which rows of which stored pieces to copy from every block."""
    begins, tasks = [block.begin for block in blocks], defaultdict[int, list[Part]](list)
    # The header too: what all ranks have loaded together is verified completely.
    tasks[0] = []
    for stored, target in needed:
        overlap = stored.at.overlap(target.at)
        assert overlap is not None
        rows = overlap.within(stored.at)[0]
        begin, end = (stored.begin + row * stored.row_bytes for row in (rows.start, rows.stop))
        if end > blocks[-1].begin + blocks[-1].length:
            # Beyond the last block is the table of checksums: its rows would not be loaded.
            raise Untrusted("its manifest points beyond the tensors of a file")
        number = bisect_right(begins, begin) - 1
        while number < len(blocks) and begins[number] < end:
            tasks[number].append(_part(blocks[number], stored, target, begin, end))
            number += 1
    return tasks


def _part(block: Block, stored: Stored, target: Piece, begin: int, end: int) -> Part:
    """The rows of a stored piece between two places of the file, as far as they are in a block."""
    first, last = max(begin, block.begin), min(end, block.begin + block.length)
    row, in_block = stored.row_bytes, first - block.begin
    ends = (first - stored.begin, last - stored.begin)
    if any(place % row for place in ends) or in_block % stored.dtype.itemsize:
        raise Untrusted("its blocks do not end where rows end")
    return Part(in_block, stored.at.rows(ends[0] // row, ends[1] // row), stored.dtype, target)


@torch.no_grad()
def _copy(memory: Tensor, part: Part) -> None:
    size = part.at.numel * part.dtype.itemsize
    source = memory[part.begin : part.begin + size].view(part.dtype).view(part.at.sizes)
    overlap = part.at.overlap(part.target.at)
    if overlap:
        target = part.target.tensor[overlap.within(part.target.at)]
        target.copy_(source[overlap.within(part.at)])


def _with_rows(piece: Piece) -> Piece:
    """Treat a scalar as a tensor with one row."""
    if piece.at.whole:
        return piece
    return piece._replace(tensor=piece.tensor.reshape(1), at=Slice.of((1,)))


def read_index(manifest: dict[str, Any], shapes: dict[str, Shape]) -> Index:
    """Where every tensor is, checked against the expected tensors and the sizes of the files.

    Raises ValueError with the first difference, and Untrusted if the manifest makes no sense.
    """
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict):
        raise Untrusted("its manifest does not say where its tensors are")
    for name in [*shapes, *tensors]:
        if name not in tensors:
            raise ValueError(f"{name} is missing in the checkpoint")
        if name not in shapes:
            raise ValueError(f"it contains {name}, which this model does not have")
    return {name: _pieces_of(name, tensors[name], shape, files) for name, shape in shapes.items()}


def _pieces_of(name: str, facts: Any, shape: Shape, files: dict[str, FileFacts]) -> list[Stored]:
    try:
        there = tuple(facts["shape"])
        found = list(_stored(facts, there, files))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Untrusted(f"its manifest does not describe {name} correctly") from None
    if there != shape:
        raise ValueError(f"{name} has shape {there} there and {shape} here")
    if not _cover(shape or (1,), [stored.at for stored in found]):
        raise ValueError(f"{name} is stored only in part")
    return found


def _stored(facts: dict[str, Any], shape: Shape, files: dict[str, FileFacts]) -> Iterator[Stored]:
    dtype = DTYPES[facts["dtype"]]
    for file, begin, offsets, sizes in facts["pieces"]:
        numbers = [begin, files[file]["bytes"], files[file]["blocks"], *offsets, *sizes, *shape]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError
        if not len(offsets) == len(sizes) == len(shape) or 0 in sizes:
            raise ValueError
        at = Slice(shape or (1,), tuple(offsets) or (0,), tuple(sizes) or (1,))
        is_inside = all(o + s <= n for o, s, n in zip(at.offsets, at.sizes, at.whole))
        if not is_inside or begin + at.numel * dtype.itemsize > files[file]["bytes"]:
            raise ValueError
        yield Stored(file, begin, at, dtype)


def _cover(shape: Shape, boxes: list[Slice]) -> bool:
    """Whether these parts cover a tensor of this shape, and none of them overlap.

    Our parts are ranges of rows of columns, so it is enough to compare rows within a column, and
    columns with the next one. More than that would take minutes for a crafted manifest.
    """
    if any(box.sizes[2:] != shape[2:] for box in boxes):
        return False
    columns: dict[Range, list[Range]] = defaultdict(list)
    for box in boxes:
        column = (box.offsets[1], box.sizes[1]) if len(shape) > 1 else (0, 1)
        columns[column].append((box.offsets[0], box.sizes[0]))
    are_apart = all(map(_are_apart, (columns, *columns.values())))
    return are_apart and sum(box.numel for box in boxes) == math.prod(shape)


def _are_apart(ranges: Iterable[Range]) -> bool:
    """Whether none of these ranges overlap."""
    return all(begin + size <= after for (begin, size), (after, _) in pairwise(sorted(ranges)))
