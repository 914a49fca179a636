"""Copy files of hosts to this machine, over SFTP. A copy that was interrupted is continued."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

RemoteFile = Any  # of paramiko: an open file on a host
CHUNK = 1 << 20  # bytes
MAX_PREFETCH = 1 << 30  # bytes that are requested before the first of them has arrived


class Part(NamedTuple):
    """A file on a host, and its copy."""

    remote: str
    local: Path
    size: int
    changed: int


def is_up_to_date(part: Part) -> bool:
    """Whether size and time show that the copy is complete."""
    try:
        found = part.local.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, int(found.st_mtime)) == (part.size, part.changed)


def resume(copy: BinaryIO, size: int) -> int:
    """Return how many bytes of a copy, which is open for appending, can be kept."""
    # Longer than the file on the host: it is a copy of another file, so start over.
    if copy.tell() > size:
        copy.truncate(0)
    return os.fstat(copy.fileno()).st_size


def copy_rest(
    source: RemoteFile,
    copy: BinaryIO,
    start: int,
    size: int,
    done: Callable[[int], None] = lambda size: None,
) -> bool:
    """Append the bytes from `start` to `size`; return False if the source has fewer."""
    source.seek(start)
    source.prefetch(min(size, MAX_PREFETCH))
    at = start
    while at < size and (data := source.read(min(CHUNK, size - at))):
        copy.write(data)
        at += len(data)
        done(len(data))
    return at == size
