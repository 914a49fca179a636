"""Megatron's index files (`.idx`), which describe the tokens in a `.bin` file.

header      MMIDIDX, two zero bytes; version 1 (uint64); code of the dtype (uint8)
counts      sequences (uint64), entries of the document list (uint64)
sequences   their lengths in tokens (int32), then their offsets in the .bin file in bytes (int64)
documents   the number of sequences before each document, and the total (int64)

All numbers are little-endian. A mode per sequence may follow, in multimodal data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.errors import UserError
from trainer.input_files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
LONGEST = (1 << 31) - 1  # tokens of a sequence
Chunks = Callable[[], Iterable["npt.NDArray[np.int64]"]]


def write_index(stream: BinaryIO, dtype: str, count: int, lengths: Chunks) -> None:
    """Write an index of documents of one sequence each. `lengths` is read twice, in chunks."""
    import numpy as np

    code = next(code for code, name in _CODES.items() if name == dtype)
    stream.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
    for chunk in lengths():
        stream.write(chunk.astype("<i4").tobytes())
    place, size = 0, np.dtype(dtype).itemsize
    for chunk in lengths():
        ends = place + np.cumsum(chunk) * size
        stream.write((ends - chunk * size).astype("<i8").tobytes())
        place = int(ends[-1])
    for first in range(0, count + 1, 1 << 20):
        stream.write(np.arange(first, min(count + 1, first + (1 << 20)), dtype="<i8").tobytes())


def read_index(file: Path) -> tuple[np.dtype[Any], npt.NDArray[np.int64]]:
    """The dtype of the tokens, and the tokens per document. Raises UserError."""
    import numpy as np

    with open(open_regular(file), "rb") as stream:
        dtype, sequences, documents = _header(file, stream.read(_HEADER.size))
        size = stream.seek(0, 2)
        expected = _HEADER.size + 12 * sequences + 8 * documents
        # Modes are a byte per sequence; anything else is not what the header says.
        if size not in (expected, expected + sequences):
            message = f"{file} has {size} bytes instead of {expected}"
            raise UserError(message, "it is truncated or damaged: create it again")
        stream.seek(_HEADER.size)
        lengths = np.fromfile(stream, "<i4", sequences).astype(np.int64)
        places = np.fromfile(stream, "<i8", sequences)
        docs = np.fromfile(stream, "<i8", documents)
    _check_sequences(file, lengths, places, np.dtype(dtype).itemsize)
    total = np.concatenate([[0], np.cumsum(lengths)])
    if not len(docs) or docs[0] != 0 or docs[-1] != sequences or (np.diff(docs) < 0).any():
        hint = f"they must count sequences from 0 to {sequences}, in ascending order"
        raise UserError(f"{file}: the documents do not match the sequences", hint)
    return np.dtype(dtype).newbyteorder("<"), np.diff(total[docs])


def _header(file: Path, data: bytes) -> tuple[str, int, int]:
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise UserError(f"{file} is not a Megatron index", "it must begin with MMIDIDX")
    _, version, code, sequences, documents = _HEADER.unpack(data)
    if version != 1:
        raise UserError(f"{file} has format version {version}", "only version 1 is supported")
    if code not in _CODES:
        name = _FLOATS.get(code, f"an unknown type (code {code})")
        raise UserError(f"{file}: the tokens are {name}", "they must be integers")
    return _CODES[code], sequences, documents


def _check_sequences(
    file: Path, lengths: npt.NDArray[np.int64], places: npt.NDArray[np.int64], itemsize: int
) -> None:
    import numpy as np

    if (lengths < 0).any():
        raise UserError(f"{file}: a sequence has a negative length", "create the index again")
    if not np.array_equal(places, (np.cumsum(lengths) - lengths) * itemsize):
        message = f"{file}: the sequences do not follow one another in the .bin file"
        raise UserError(message, "create both files again, or merge them with Megatron's tools")
