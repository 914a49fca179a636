"""Read small files that may be missing, incomplete or damaged, or come from another host."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

LATEST_TIME = 1e11  # seconds since the epoch; some platforms have no date after the year 5000


def read_text(file: Path) -> str:
    # A missing file counts as empty: most files exist only in a part of a job's life.
    try:
        with open(file, encoding="utf-8", errors="replace", opener=open_at_once) as stream:
            return stream.read()
    except OSError:
        return ""


def read_bytes(file: Path) -> bytes:
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            return stream.read()
    except OSError:
        return b""


def open_at_once(path: str, flags: int) -> int:
    """Open a file as `open` does, but raise OSError for a FIFO, which would block forever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "is a FIFO", path)
    return descriptor


def read_json(file: Path) -> dict[str, Any] | None:
    return parse_json(read_text(file))


def parse_json(text: str) -> dict[str, Any] | None:
    """Return a JSON object, or None if the text is anything else."""
    try:
        value = json.loads(text)
    # RecursionError: deeply nested JSON, which another host may have sent.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; skip incomplete and invalid lines."""
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def is_time(value: object) -> TypeGuard[float]:
    """Whether this is a number that can be a time, in seconds since the epoch."""
    # Other values, such as NaN or 1e400, cannot be formatted as a date.
    return isinstance(value, (int, float)) and 0 <= value < LATEST_TIME
