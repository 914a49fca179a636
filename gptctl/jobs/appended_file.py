"""A file that another program appends to: read once, and from then on only what is new.

Knows bytes and lines, not what is in them. Takes bounded memory, whatever the file is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gptctl.engine.file_reading import open_at_once

LONGEST_LINE = 1 << 20  # bytes; what has no line end for longer is skipped


class Appended(NamedTuple):
    data: bytes  # whole lines
    is_new_file: bool  # what was read before is not a part of this file


class AppendedFile:
    def __init__(self, path: Path, most: int) -> None:
        """`most`: bytes that are read at once, from the end of the file."""
        self.path = path
        self._most = most
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._is_inside = False  # the offset is inside of a line

    def new_lines(self) -> Appended:
        """Return the lines since the last call; nothing while the file cannot be read."""
        try:
            with open(self.path, "rb", opener=open_at_once) as stream:
                status = os.fstat(stream.fileno())
                identity = (status.st_dev, status.st_ino)
                # A file that was replaced or became shorter is another one: a trainer that resumes
                # rewrites its metrics.
                is_new = identity != self._identity or status.st_size < self._offset
                if is_new:
                    self._identity, self._offset, self._is_inside = identity, 0, False
                if status.st_size == self._offset:
                    return Appended(b"", is_new)
                if status.st_size - self._offset > self._most:
                    self._offset, self._is_inside = status.st_size - self._most, True
                data = os.pread(stream.fileno(), self._most, self._offset)
        except OSError:
            return Appended(b"", False)
        return Appended(self._whole_lines(data), is_new)

    def _whole_lines(self, data: bytes) -> bytes:
        complete, end, rest = data.rpartition(b"\n")
        # An endless line is not read again and again.
        taken = len(data) if len(rest) > LONGEST_LINE else len(data) - len(rest)
        self._offset += taken
        if self._is_inside:
            complete = complete.partition(b"\n")[2]
        self._is_inside = (self._is_inside and not end) or len(rest) > LONGEST_LINE
        return complete + end
