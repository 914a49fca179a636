"""Checksums of files: of a whole file, or of its blocks, which can be verified one by one.

A file with blocks ends with a table: the length and the SHA-256 of every block before it. The
manifest has the checksum of the table, so one block can be trusted without reading the others.
Torch-free: `gptctl fetch` uses it, too.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trainer.input_files import explain, open_regular

READ_SIZE = 1 << 22
LARGEST_MANIFEST = 1 << 28  # bytes; those of a thousand ranks have about ten million
_ENTRY = struct.Struct("<Q32s")
ENTRY_BYTES = _ENTRY.size

FileFacts = dict[str, Any]
Advance = Callable[[int], None]


class Block(NamedTuple):
    begin: int
    length: int
    digest: bytes


def is_facts(value: object) -> bool:
    """Whether a value from JSON can say what a file is."""
    if not isinstance(value, dict) or not isinstance(value.get("sha256"), str):
        return False
    numbers = (value.get("bytes"), value.get("blocks", 0))
    return all(type(number) is int and number >= 0 for number in numbers)


class Damaged(Exception):
    """A file is not what its manifest says."""


def block_table(blocks: Iterable[tuple[int, bytes]]) -> bytes:
    """The table at the end of a file, from the length and the digest of every block."""
    return b"".join(_ENTRY.pack(length, digest) for length, digest in blocks)


def block_facts(size: int, table: bytes) -> FileFacts:
    """What a manifest says of a file with blocks."""
    return {
        "bytes": size,
        "blocks": len(table) // ENTRY_BYTES,
        "sha256": hashlib.sha256(table).hexdigest(),
    }


def file_facts(file: Path, sync: bool = False, advance: Advance = lambda _: None) -> FileFacts:
    """Size and checksum of a whole file; `sync` also waits until the file is on disk.

    `advance` is called with the size of each part that was read.
    """
    with opened(file) as descriptor:
        if sync:
            os.fsync(descriptor)
        return {"bytes": os.fstat(descriptor).st_size, "sha256": _digest_of(descriptor, advance)}


def _digest_of(descriptor: int, advance: Advance = lambda _: None) -> str:
    digest, place = hashlib.sha256(), 0
    while block := os.pread(descriptor, READ_SIZE, place):
        digest.update(block)
        place += len(block)
        advance(len(block))
    return digest.hexdigest()


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a file for reading. Raises Damaged if that is impossible."""
    try:
        descriptor = open_regular(file)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise Damaged(explain(file.name, error)) from None
    try:
        yield descriptor
    except OSError as error:
        raise Damaged(f"cannot read {file.name}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def require_size(descriptor: int, name: str, facts: FileFacts) -> None:
    size = os.fstat(descriptor).st_size
    if size != facts["bytes"]:
        raise Damaged(f"{name} has {size} bytes instead of {facts['bytes']}")


def read_table(descriptor: int, name: str, facts: FileFacts) -> list[Block]:
    """Read and verify the table of blocks. Trusts no number that the file does not confirm."""
    require_size(descriptor, name, facts)
    length = facts["blocks"] * ENTRY_BYTES
    end = facts["bytes"] - length
    if end < 0 or length < 0:
        raise Damaged(f"{name} is damaged: it has no table of checksums")
    table = os.pread(descriptor, length, end)
    if hashlib.sha256(table).hexdigest() != facts["sha256"]:
        raise Damaged(f"{name} is damaged: wrong checksum")
    blocks, begin = [], 0
    for size, digest in _ENTRY.iter_unpack(table):
        blocks.append(Block(begin, size, digest))
        begin += size
    if begin != end:
        raise Damaged(f"{name} is damaged: its table of checksums does not cover it")
    return blocks


def read_block(descriptor: int, name: str, block: Block, into: memoryview) -> None:
    """Read a block into memory and verify it."""
    view = into[: block.length]
    done = 0
    while done < block.length:
        count = os.preadv(descriptor, [view[done:]], block.begin + done)
        if not count:
            raise Damaged(f"{name} ends too early")
        done += count
    if hashlib.sha256(view).digest() != block.digest:
        raise Damaged(f"{name} is damaged: wrong checksum")


def verify_file(file: Path, facts: FileFacts) -> Iterator[None]:
    """Verify a file piece by piece: the caller may stop in between. Raises Damaged."""
    with opened(file) as descriptor:
        require_size(descriptor, file.name, facts)
        if "blocks" not in facts:  # a file of version 1, or one that is not a tensor file
            if _digest_of(descriptor) != facts["sha256"]:
                raise Damaged(f"{file.name} is damaged: wrong checksum")
            return
        blocks = read_table(descriptor, file.name, facts)
        scratch = memoryview(bytearray(max((block.length for block in blocks), default=0)))
        for block in blocks:
            read_block(descriptor, file.name, block, scratch)
            yield


def damage_in(file: Path, facts: FileFacts) -> str:
    """What is wrong with a file, or an empty string."""
    try:
        for _ in verify_file(file, facts):
            pass
    except Damaged as damage:
        return str(damage)
    return ""
