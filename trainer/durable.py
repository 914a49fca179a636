"""Atomic file writes: after a crash, a file has its old or its new content. Torch-free."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file that replaces `file` once it is complete and on disk.

    If the body raises, the temporary file is deleted and `file` stays as it was.
    """
    # In the same folder, because a rename is atomic only within one file system; with the number
    # of the thread, which no process has: two writers never write to the same temporary file.
    part = file.with_name(f"{file.name}.part{threading.get_native_id()}")
    try:
        with _created(part) as stream:
            yield stream
            stream.flush()
            # Before the rename: otherwise a power failure can leave the new name with no content.
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(file.parent)


def _created(part: Path) -> BinaryIO:
    try:
        return open(part, "xb")
    except FileExistsError:
        # Left by a killed process, or by somebody else: a FIFO would block, a link lead elsewhere.
        part.unlink()
        return open(part, "xb")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: fsync of a file does not make its name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine has this folder locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
