"""Copy files of hosts to this machine, over SFTP. A copy that was interrupted is continued."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gptctl.remote.sftp import RemoteFile


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
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        # A host has chosen the name.
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
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
    at = start
    for data in source.chunks(start, size):
        copy.write(data)
        at += len(data)
        done(len(data))
    return at == size
