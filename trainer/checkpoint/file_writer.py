"""Writes a new file from its beginning to its end, past the page cache where that is possible.

The page cache costs more CPU time than the disk, and what is written is not read soon. Direct
writes need aligned memory, so the bytes are copied to a slot, while the other slot is written.
Two threads write, and run the actions of `run_beside`, such as checksums: while one waits for the
disk, the other computes. With more threads, the next write would wait for a core.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

SLOT = 1 << 21  # bytes to write at once
UNIT = 4096  # bytes: direct writes start and end at multiples of it, in memory and in the file
FLUSH = 1 << 26  # bytes after which the disk starts to write what is in the page cache
DIRECT = getattr(os, "O_DIRECT", 0)  # not on all systems
THREADS = 2
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

Data = TypeVar("Data")
Result = TypeVar("Result")


class FileWriter:
    """Appends bytes to a file that must not exist. They are on disk after `finish`."""

    def __init__(self, file: Path) -> None:
        self._slots = [np.frombuffer(mmap.mmap(-1, SLOT), np.uint8) for _ in range(2)]
        self._filled = self._written = self._unflushed = 0  # bytes
        self._threads, self._flusher = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(1)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_direct = True
        self._set_direct(True)
        self._writing, self._flushing = _done(), _done()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Before the descriptor's number can belong to another file.
        self._threads.shutdown()
        self._flusher.shutdown()
        os.close(self._descriptor)

    def append(self, data: memoryview) -> None:
        while len(data):
            count = min(len(data), SLOT - self._filled)
            target = self._slots[0][self._filled : self._filled + count]
            np.copyto(target, np.frombuffer(data[:count], np.uint8))  # without the interpreter lock
            self._filled += count
            data = data[count:]
            if self._filled == SLOT:
                self._send()

    def run_beside(self, action: Callable[[Data], Result], data: Data) -> Future[Result]:
        """Run an action while the disk writes what was appended."""
        return self._threads.submit(action, data)

    def finish(self) -> int:
        """Wait until the file is on disk. Returns its size."""
        last, begin = self._slots[0].data[: self._filled], self._written
        aligned = len(last) // UNIT * UNIT
        self._writing.result()
        self._write(last[:aligned], begin)
        self._set_direct(False)
        self._write(last[aligned:], begin + aligned)
        self._flushing.result()  # the system reports an error of the disk only once
        os.fsync(self._descriptor)
        return begin + len(last)

    def _send(self) -> None:
        """Write the full slot, and continue with the other one."""
        self._writing.result()
        self._writing = self._threads.submit(self._write, self._slots[0].data, self._written)
        self._slots.reverse()
        self._written, self._filled = self._written + SLOT, 0
        if self._unflushed >= FLUSH and self._flushing.done():
            self._flushing.result()
            self._unflushed = 0
            self._flushing = self._flusher.submit(os.fdatasync, self._descriptor)

    def _write(self, data: memoryview, place: int) -> None:
        """Write all bytes: a system call may write fewer."""
        while len(data):
            try:
                count = os.pwrite(self._descriptor, data, place)
            except OSError as error:
                if not self._is_direct or error.errno not in _NOT_DIRECT:
                    raise
                self._set_direct(False)
                continue
            data, place = data[count:], place + count
            self._unflushed += 0 if self._is_direct else count

    def _set_direct(self, wanted: bool) -> None:
        """Some file systems refuse it here, others only when they write."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | DIRECT if wanted else flags & ~DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            self._is_direct = wanted and bool(DIRECT)
        except OSError:
            self._is_direct = False


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
