"""Reads back what this rank wrote, in a thread of low priority, and remembers the result.

No rank waits for it: results are empty files beside the data.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.manifest import record
from trainer.checkpoint.priority import lower_thread_priority
from trainer.checkpoint_names import is_damaged, is_verified
from trainer.checksums import Damaged, FileFacts, verify_file
from trainer.input_files import open_regular

LONGEST_POLL = 1.0  # seconds
AT_THE_END = 10.0  # seconds that a run waits for its last verification


class Job(NamedTuple):
    file: Path
    facts: FileFacts


class Verifier:
    """Verifies one file after the other. `finished` is called after a checkpoint is verified."""

    def __init__(self, warn: Callable[[str], None], finished: Callable[[], None] | None) -> None:
        self.warn, self.finished = warn, finished
        self._next: Job | None = None
        self._is_reading = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def start(self, job: Job) -> None:
        """Verify a file in the background, after the one that is being read."""
        with self._lock:
            self._next = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
                self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a file is being read back, or is the next one. Waiting for others is not busy."""
        with self._lock:
            return self._next is not None or self._is_reading

    def wait(self, seconds: float) -> bool:
        """Whether everything is verified after at most so many seconds."""
        thread = self._thread
        if thread:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Wait a little, then stop. What is not verified yet will be when it is loaded."""
        self.wait(AT_THE_END)
        self._closing.set()
        self.wait(AT_THE_END)  # for the block that is being read

    def _take(self) -> Job | None:
        with self._lock:
            job, self._next = self._next, None
            self._is_reading = job is not None
            if job is None:
                self._thread = None
            return job

    def _run(self) -> None:
        lower_thread_priority()
        while job := self._take():
            # A full disk or memory, or a folder that was deleted meanwhile: it stays unverified.
            with contextlib.suppress(OSError, MemoryError):
                try:
                    self._verify(job)
                finally:
                    self._is_reading = False
                self._wait_for_others(job.file.parent)

    def _verify(self, job: Job) -> None:
        drop_from_cache(job.file)
        try:
            for _ in verify_file(job.file, job.facts):
                if self._closing.is_set():
                    return
        except Damaged as damage:
            if job.file.exists():
                # First: the disk may not take the record.
                self.warn(f"{job.file.parent} is unusable: {damage} (read back after writing)")
                record(job.file, is_good=False)
            return
        record(job.file, is_good=True)

    def _wait_for_others(self, folder: Path) -> None:
        """On the rank that deletes old checkpoints: wait until all ranks have verified this one."""
        pause = 0.02
        while self.finished and not is_verified(folder):
            is_over = self._next or self._closing.is_set() or is_damaged(folder)
            if is_over or not folder.exists():
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
        if self.finished:
            self.finished()


def drop_from_cache(file: Path) -> None:
    """Make the next read come from the disk. Works for files that were synced."""
    descriptor = open_regular(file)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def record_all(folder: Path, names: Iterable[str]) -> None:
    """Remember that all files of a checkpoint are good, after all ranks have loaded it."""
    with contextlib.suppress(OSError):  # a folder that cannot be written
        for name in names:
            record(folder / name, is_good=True)
