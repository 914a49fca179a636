"""Copy files of hosts to this machine, over SFTP. A copy that was interrupted is continued."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gptctl.engine.file_reading import open_at_once, read_tail
from gptctl.remote.sftp import RemoteFile, SftpReader

OVERLAP = 256  # bytes before the end that must match: each record ends with its own time


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


def continue_copy(files: SftpReader, part: Part) -> bool:
    """Append what is new of a file; return False if the copy is of another file of its name.

    The copy and the file must have the same bytes before the place where the copy ends.
    """
    # Whatever is here under its name must not block: other jobs on this host wait meanwhile.
    with open(part.local, "ab", opener=open_at_once) as copy:
        start = os.fstat(copy.fileno()).st_size
        if start >= part.size:
            return start == part.size
        known = read_tail(part.local, OVERLAP)
        with (
            files.open(part.remote) as source,
            closing(source.chunks(start - len(known), part.size)) as chunks,
        ):
            found = b""
            while len(found) < len(known) and (data := next(chunks, b"")):
                found += data
            if not found.startswith(known):
                return False
            copy.write(found[len(known) :])
            for data in chunks:
                copy.write(data)
    return True


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
