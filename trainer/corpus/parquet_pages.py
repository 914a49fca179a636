"""The sizes of the pages in a parquet file, before a library decompresses them. Torch-free.

A column chunk is a sequence of pages. Each has a header in Thrift's compact protocol: field 2 is
its size when decompressed, field 3 its size in the file. The metadata at the end of the file has
neither, and 1 KB can contain a page of gigabytes.
"""

from __future__ import annotations

from typing import BinaryIO

_SIZE, _SIZE_IN_FILE = 2, 3
_INTEGERS, _BINARY, _STRUCT = (4, 5, 6), 8, 12
_WIDTH = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of booleans, of a byte, and of a double
_DEEPEST = 8


def largest_page(stream: BinaryIO, begin: int, size: int) -> int:
    """Bytes of the largest page of a column chunk. Raises ValueError if it is damaged."""
    largest, place = 0, begin
    while place < begin + size:
        stream.seek(place)
        fields = _Header(stream).struct()
        if min(fields.get(_SIZE, -1), fields.get(_SIZE_IN_FILE, -1)) < 0:
            raise ValueError("a page has no size")
        largest = max(largest, fields[_SIZE])
        place = stream.tell() + fields[_SIZE_IN_FILE]
    return largest


class _Header:
    """Reads the integers of a struct, and skips all else."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def struct(self, depth: int = 0) -> dict[int, int]:
        if depth > _DEEPEST:
            raise ValueError("a page header is nested too deeply")
        found: dict[int, int] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._integer()
            if kind in _INTEGERS:
                found[number] = self._integer()
            else:
                self._skip(kind, depth)
        return found

    def _skip(self, kind: int, depth: int) -> None:
        if kind == _STRUCT:
            self.struct(depth + 1)
        elif kind == _BINARY:
            self.stream.seek(self._varint(), 1)
        elif kind in _WIDTH:
            self.stream.seek(_WIDTH[kind], 1)
        else:  # lists and maps: no field of a page header is one
            raise ValueError("a page header has an unknown field")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number in a page header is too long")

    def _byte(self) -> int:
        data = self.stream.read(1)
        if not data:
            raise ValueError("a page header ends too early")
        return data[0]
