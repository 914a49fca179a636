"""How many bytes the run folders of jobs take on this machine.

Nothing is remembered: a run that trains grows. A folder may have millions of files, or be on a
server that does not answer, so the time is bounded, and an unfinished count says so.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gptctl.deadline import Deadline
from gptctl.jobs.store import JobRecord
from gptctl.remote.parallel import in_parallel
from gptctl.text import count, size_text

THREADS = 8  # folders at the same time: on network file systems each answer takes a while
SHOW_EVERY = 256  # entries between two reports of the progress
Show = Callable[[str], None]


class DiskUse(NamedTuple):
    """The bytes of a folder, or of those that were counted when the time was up."""

    bytes: int
    is_complete: bool

    def __str__(self) -> str:
        return size_text(self.bytes) if self.is_complete else f"> {size_text(self.bytes)}"


class _Count:
    """What is counted so far. A thread that hangs in a system call leaves it as it is."""

    def __init__(self) -> None:
        self.bytes, self.is_complete = 0, False


def disk_use(records: Sequence[JobRecord], deadline: Deadline, show: Show) -> dict[str, DiskUse]:
    """Count the bytes of run folders by job id; a job without a folder is left out."""
    counts = {record.id: _Count() for record in records}
    showing = threading.Lock()

    def report() -> None:
        # While one thread prints, the others go on counting. Later nobody listens any more.
        if deadline.left and showing.acquire(blocking=False):
            try:
                done = sum(each.is_complete for each in counts.values())
                total = sum(each.bytes for each in counts.values())
                folders = count(len(counts), "run folder")
                show(f"counting bytes: {done:,} of {folders}, {size_text(total)}")
            finally:
                showing.release()

    def measure(record: JobRecord) -> bool:
        return _add_up(record.local_dir, counts[record.id], deadline, report)

    found = in_parallel(measure, records, THREADS, deadline)
    return {
        record.id: DiskUse(counts[record.id].bytes, counts[record.id].is_complete)
        for record, is_folder in zip(records, found)
        if is_folder is not False
    }


def total_use(counts: Sequence[DiskUse]) -> DiskUse:
    return DiskUse(sum(each.bytes for each in counts), all(each.is_complete for each in counts))


def _add_up(root: str, found: _Count, deadline: Deadline, report: Callable[[], None]) -> bool:
    """Add up the sizes of all files; links count as links. Return False if there is no folder."""
    try:
        if not stat.S_ISDIR(os.lstat(root).st_mode):
            return False
    except OSError:
        return False
    folders, seen, is_readable = [root], 0, True
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen % SHOW_EVERY == 0:
                        report()
                        if not deadline.left:
                            return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        found.bytes += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # a running job has just removed it
            continue
        except OSError:  # without permission: what is in it stays unknown
            is_readable = False
    found.is_complete = is_readable
    report()
    return True
