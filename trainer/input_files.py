"""Reads files that others, or a bad disk, may have written. Standard library only, torch-free.

Only regular files are opened, and opening never blocks: a FIFO or a device in the place of a file
is an OSError. JSON has limits for its size, depth and numbers; beyond them it is a ValueError.
gptctl reads its own files by the same rules (`gptctl/engine/file_reading.py`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from typing import Any, NoReturn

DEEPEST = 100  # levels of JSON; a config may have 32, and a manifest contains one
LARGEST_STATUS = 1 << 20  # bytes of a small file of ours, such as a status; they have a few hundred
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Unsuitable(OSError):
    """A file that is not what it should be. `strerror` continues a sentence with its name."""


def explain(name: str, error: Exception) -> str:
    """Why a file with this name cannot be used, as a sentence."""
    reason = getattr(error, "strerror", None) or str(error)
    return f"{name} {reason}" if isinstance(error, Unsuitable) else f"cannot read {name}: {reason}"


def open_regular(file: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Never blocks. Raises OSError."""
    # Without O_NONBLOCK, opening a FIFO waits for its other end, perhaps forever.
    try:
        descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # A socket, or a FIFO that nobody reads; the system says "No such device".
        if error.errno == errno.ENXIO:
            raise _not_regular(file) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(file)
    return descriptor


def _not_regular(file: str | os.PathLike[str]) -> Unsuitable:
    return Unsuitable(errno.EINVAL, "is not a regular file", os.fspath(file))


def open_own(file: str | os.PathLike[str], flags: int) -> int:
    """Like `open_regular`, for a file that we write: does not follow a link to another one."""
    try:
        return open_regular(file, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the system says "Too many levels"
            raise Unsuitable(error.errno, "is a symbolic link", os.fspath(file)) from None
        raise


def require_regular(file: str | os.PathLike[str]) -> None:
    """Raise OSError if a file that a library opens by its name is not a regular one."""
    os.close(open_regular(file))


def read_bytes(file: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole file. Raises OSError, also if it has more than `most` bytes."""
    with open(open_regular(file), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        # Not `most` at once, which Python would allocate whatever the size is.
        data = b"" if size > most else stream.read(size + 1)
        if len(data) > size:  # the file grows, or the system tells no size
            data += stream.read(most + 1 - len(data))
    if max(size, len(data)) > most:
        raise Unsuitable(
            errno.EFBIG, f"has {max(size, len(data))} bytes, at most {most} expected", str(file)
        )
    return data


def read_object(file: str | os.PathLike[str], most: int = LARGEST_STATUS) -> dict[str, Any]:
    """Read a JSON object. Raises OSError or ValueError."""
    return parse_object(read_bytes(file, most))


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object, with lone surrogates replaced: no file can have them in its name."""
    value: dict[str, Any] = replaced_surrogates(parse_exactly(data), data)
    return value


def parse_exactly(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object as it is, for a checksum over it. Raises ValueError."""
    try:
        value = json.loads(
            data if isinstance(data, str) else data.decode(errors="replace"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _require_depth(value)
    return value


def replaced_surrogates(value: Any, data: bytes | str) -> Any:
    """The value with lone surrogates replaced. `data` is its text, which seldom has any."""
    text = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    if not _ESCAPED_SURROGATE.search(text) and not _has_surrogates(data):
        return value
    return _clean(value)


def _has_surrogates(data: bytes | str) -> bool:
    return isinstance(data, str) and bool(_SURROGATE.search(data))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _require_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner for item in level for inner in _items(item) if isinstance(inner, (list, dict))
        ]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is infinite")
    return number


def _integer(text: str) -> int:
    # By length first: converting a million digits would take minutes.
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise ValueError("a number has more than 64 bits")
    return number
