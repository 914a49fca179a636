"""Space kept in a job's folder, so that the result can be recorded on a disk that is full then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE = 64 << 10  # bytes; the result and the outcome of an attempt take a few thousand
NAME = ".spare-space"


def keep_space(folder: Path) -> None:
    # Without it, a job on a full disk runs as before.
    with suppress(OSError):
        (folder / NAME).write_bytes(bytes(SIZE))


def free_space(folder: Path) -> None:
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


@contextmanager
def with_spare_space(folder: Path) -> Iterator[None]:
    """Free the space for a moment, while ranks are not running and cannot take it."""
    free_space(folder)
    try:
        yield
    finally:
        keep_space(folder)
