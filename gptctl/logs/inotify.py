"""What Linux reports about the files of some folders (inotify): written, or names changed.

Knows nothing of logs. File systems may leave out what other hosts write: see `log_watch.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

_MODIFY, _MOVED, _CREATE, _DELETE = 0x2, 0xC0, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_LOST, _NO_LONGER_WATCHED, _ONLY_FOLDERS = 0x4000, 0x8000, 0x1000000
_WANTED = _MODIFY | _MOVED | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLY_FOLDERS
_HEADER = struct.Struct("iIII")  # number of the watch, mask, cookie, length of the name
_BUFFER = 1 << 16

Name = tuple[int, str]  # number of the folder, and name; empty for the folder itself


class FolderReports:
    """Reports about numbered folders. Raises OSError if the system has no watches left."""

    def __init__(self) -> None:
        self.written: set[Name] = set()
        self.renamed: set[Name] = set()  # created, removed or renamed
        self.were_lost = False  # there were too many
        self._folders: dict[int, int] = {}  # number of each watched folder
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = _checked(_libc().inotify_init1(flags))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def watch(self, folders: Mapping[int, str]) -> set[int]:
        """Watch exactly these folders; return the numbers of those that were not watched before.

        A folder that replaced another of the same name counts as new. Missing ones are left out.
        """
        watched = {}
        for number, folder in folders.items():
            with suppress(FileNotFoundError, NotADirectoryError):
                watched[self._added(folder)] = number
        before, self._folders = self._folders, watched
        for watch in before.keys() - watched.keys():
            # Fails if the folder was removed.
            _libc().inotify_rm_watch(self._descriptor, watch)
        return {number for watch, number in watched.items() if before.get(watch) != number}

    def _added(self, folder: str) -> int:
        # Adding a folder again gives the same number, unless another folder has its name now.
        return _checked(
            _libc().inotify_add_watch(self._descriptor, os.fsencode(folder), _WANTED), folder
        )

    def wait(self, seconds: float) -> None:
        """Return as soon as there is a report."""
        self._poll.poll(max(0.0, seconds) * 1000)

    def read(self) -> None:
        """Add new reports to `written`, `renamed` and `were_lost`."""
        with suppress(BlockingIOError):
            while data := os.read(self._descriptor, _BUFFER):
                self._note(data)

    def _note(self, data: bytes) -> None:
        position, folders = 0, self._folders
        while position < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, position)
            begin = position + _HEADER.size
            position = begin + length
            # A report about a folder that was replaced may still be in the queue.
            if watch in folders and not mask & _NO_LONGER_WATCHED:
                names = self.written if mask & _MODIFY else self.renamed
                names.add((folders[watch], _decoded(data[begin:position])))
            elif mask & _LOST:
                self.were_lost = True

    def close(self) -> None:
        os.close(self._descriptor)


# Cached: the same files are written all the time.
@lru_cache(maxsize=1 << 14)
def _decoded(padded: bytes) -> str:
    return os.fsdecode(padded.rstrip(b"\0"))


def _checked(result: int, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError(errno.ENOSYS, "this system has no inotify")
    return libc
