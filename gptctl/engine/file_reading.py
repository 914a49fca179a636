"""Read small files that may be missing, incomplete or damaged, or come from another host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

LATEST_TIME = 1e11  # seconds since the epoch; some platforms have no date after the year 5000


def read_text(file: Path) -> str:
    # A missing file counts as empty: most files exist only in a part of a job's life.
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(read_text(file))
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
