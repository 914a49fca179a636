"""Writes the pieces of a rank to one safetensors file, with a checksum for every block.

The file has a header, the raw tensors, and a tensor named `checksums`: the table of blocks. Blocks
end where rows end, so a reader can use a part of a tensor as soon as its block is verified.
Any program that reads safetensors can open the file; the positions of the pieces in their whole
tensors are in its metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.file_writer import FileWriter
from trainer.checksums import ENTRY_BYTES, FileFacts, block_facts, block_table
from trainer.slices import Piece

BLOCK = 1 << 22  # bytes: small enough to stay in a cache while it is hashed and copied
ALIGNMENT = 64
CHECKSUMS = "checksums"
POSITIONS = "positions"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Written(NamedTuple):
    """What the manifest needs to know of a file."""

    facts: FileFacts
    tensors: list[dict[str, Any]]  # of every piece: name, dtype, shape, begin, offsets, sizes


def file_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def write_pieces(file: Path, pieces: dict[str, Piece]) -> Written:
    """Write a file and wait until it is on disk. The tensors must be contiguous and on the host."""
    # Larger elements first, so that all of them are aligned.
    ordered = dict(sorted(pieces.items(), key=lambda item: (-item[1].tensor.itemsize, item[0])))
    blocks = list(_blocks(ordered))
    header = _header(ordered, num_blocks=1 + len(blocks))
    blocks.insert(0, [memoryview(header)])
    with FileWriter(file) as writer:
        table = _write_blocks(writer, blocks)
        writer.append(memoryview(table))
        size = writer.finish()
    return Written(block_facts(size, table), list(_index(ordered, len(header))))


def _header(pieces: dict[str, Piece], num_blocks: int) -> bytes:
    """The header of the file, with its length. Offsets in it count from its end."""
    positions = {
        name: {"shape": piece.at.whole, "offsets": piece.at.offsets}
        for name, piece in pieces.items()
    }
    content: dict[str, Any] = {"__metadata__": {"format": "pt", POSITIONS: json.dumps(positions)}}
    end = 0
    for entry in _index(pieces, 0):
        end = entry["begin"] + pieces[entry["name"]].tensor.nbytes
        content[entry["name"]] = {
            "dtype": entry["dtype"],
            "shape": entry["sizes"],
            "data_offsets": [entry["begin"], end],
        }
    content[CHECKSUMS] = {
        "dtype": "U8",
        "shape": [num_blocks, ENTRY_BYTES],
        "data_offsets": [end, end + num_blocks * ENTRY_BYTES],
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _index(pieces: dict[str, Piece], begin: int) -> Iterator[dict[str, Any]]:
    for name, piece in pieces.items():
        yield {
            "name": name,
            "dtype": _NAMES[piece.tensor.dtype],
            "shape": list(piece.at.whole),
            "begin": begin,
            "offsets": list(piece.at.offsets),
            "sizes": list(piece.at.sizes),
        }
        begin += piece.tensor.nbytes


def _blocks(pieces: dict[str, Piece]) -> Iterator[list[memoryview]]:
    """Cut the tensors into blocks: rows of a large tensor, or several small tensors."""
    block: list[memoryview] = []
    free = BLOCK
    for piece in pieces.values():
        data, row = raw_bytes(piece.tensor), piece.at.row_numel * piece.tensor.itemsize
        while len(data):
            fitting = max(0, free) // row * row  # whole rows only, but at least one
            if not fitting and block:
                yield block
                block, free = [], BLOCK
                continue
            block.append(data[: fitting or row])
            data, free = data[len(block[-1]) :], free - len(block[-1])
    if block:
        yield block


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _write_blocks(writer: FileWriter, blocks: list[list[memoryview]]) -> bytes:
    """Write blocks, and hash each while the disk writes. Returns their table."""
    digests = []
    for block in blocks:
        for view in block:
            writer.append(view)
        digests.append(writer.run_beside(_digest, block))
    lengths = [sum(map(len, block)) for block in blocks]
    return block_table(zip(lengths, [digest.result() for digest in digests]))


def _digest(views: list[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.digest()


def tensor_index(files: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Where every tensor is: the pieces of all files, for the manifest."""
    index: dict[str, Any] = {}
    for file, tensors in files.items():
        for each in tensors:
            facts = {"dtype": each["dtype"], "shape": each["shape"], "pieces": []}
            place = [file, each["begin"], each["offsets"], each["sizes"]]
            index.setdefault(each["name"], facts)["pieces"].append(place)
    return index
