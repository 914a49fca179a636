"""Reads arrays inside npz files, which others may have made to need more memory than there is.

The size of an array is known before it is read, and is what its header says. An array that is not
compressed cannot be larger than its file; a compressed one has a limit. Torch-free.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LARGEST = 1 << 27  # elements of a compressed array: 1 GiB as 64-bit integers
_LONGEST_HEADER = 1 << 16  # bytes; of one dimension it has about a hundred
_KNOWN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes


class _Header(NamedTuple):
    length: int  # bytes before the data
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def array_of(file: Path, name: str, expected: str) -> npt.NDArray[Any]:
    """Map an array into memory; a compressed one is read. Raises UserError or ValueError."""
    import numpy as np

    with zipfile.ZipFile(file) as archive:
        info = _member(archive, file, name, expected)
        with archive.open(info) as stream:
            header = _header_of(file, name, stream.read(_LONGEST_HEADER))
        size = header.length + math.prod(header.shape) * header.dtype.itemsize
        if size != info.file_size:
            raise ValueError(f"{name} does not have the size that its header says")
        if 0 in header.shape:
            return np.empty(header.shape, header.dtype)  # an empty array cannot be mapped
        if info.compress_type == zipfile.ZIP_STORED:
            place = _place(file, info) + header.length
            return np.memmap(file, header.dtype, "r", offset=place, shape=header.shape)
        if (count := math.prod(header.shape)) > LARGEST:
            message = f"{file}: the compressed array {name} has {count:,} elements"
            hint = f"at most {LARGEST:,} are read: do not compress it (numpy.savez)"
            raise UserError(message, hint)
        with archive.open(info) as stream:
            stream.read(header.length)
            return np.frombuffer(stream.read(), header.dtype).reshape(header.shape)


def _member(archive: zipfile.ZipFile, file: Path, name: str, expected: str) -> zipfile.ZipInfo:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if name not in members:
        has = ", ".join([*members][:10]) or "no arrays"
        raise UserError(f"{file} has no array {name}", f"it has {has}; expected: {expected}")
    if members[name].compress_type not in _KNOWN:
        raise ValueError(f"{name} has a compression that numpy does not write")
    return members[name]


def _header_of(file: Path, name: str, data: bytes) -> _Header:
    import numpy as np

    # Of these bytes only: the length of a header may be anything, and numpy would read it.
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read_header[version](stream)
    if dtype.hasobject:
        message = f"{file}: {name} contains Python objects"
        raise UserError(message, f"{name} must contain integers")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has a negative size")
    return _Header(stream.tell(), shape, dtype)


def _place(file: Path, info: zipfile.ZipInfo) -> int:
    """Where the data of a member begins."""
    with open(file, "rb") as stream:
        # The local zip header ends with the lengths of two fields that come before the data.
        stream.seek(info.header_offset + 26)
        first, second = struct.unpack("<2H", stream.read(4))
    return int(info.header_offset + 30 + first + second)
