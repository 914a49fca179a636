"""Write files so that a crash leaves either the old content or the new one, never a part of it.

The trainer has its own copy of this code: neither package can import the other on a node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def private_files() -> Iterator[None]:
    """Create files that only the user can read: folders with mode 0700, files with mode 0600."""
    # The umask belongs to the process, so this also affects other threads.
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def private(path: str, flags: int) -> int:
    """An opener: a file that it creates can be read only by the user, whatever the umask is."""
    return os.open(path, flags, 0o600)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces the file once it is complete and on disk."""
    # The number of the thread keeps two writers apart: each renames its own complete file. No
    # process has the same one.
    part = file.with_name(f"{file.name}.part{threading.get_native_id()}")
    try:
        with _created(part) as stream:
            yield stream
            # The content must be on disk before the name points to it.
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError as error:
        # A full disk raises without a file name.
        error.filename = error.filename or str(file)
        raise
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(file.parent)


def _created(part: Path) -> BinaryIO:
    try:
        return open(part, "xb", opener=private)
    except FileExistsError:
        # Left by a killed process, or by somebody else: a FIFO would block, a link lead elsewhere.
        part.unlink()
        return open(part, "xb", opener=private)


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a crash, not only the content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
