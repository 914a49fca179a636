"""How much hosts may send to this machine. They may be broken or hostile: a file of 4 EB costs them
nothing, and would fill the disk here. Pure, except for `room_in`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

GB = 10**9
# Bytes of logs of each node: a rank that writes 1 KB a second needs 16 weeks for it.
MAX_LOGS = 10 * GB
# Bytes that one fetch copies: a checkpoint of 70 billion parameters with its AdamW has 840 GB.
MAX_FETCHED = 1000 * GB
MAX_FILES = 100_000  # files and folders that one fetch copies from a host
MAX_DEPTH = 50  # folders inside each other; more would not fit into a path of 4 KB soon
MAX_ATTEMPTS = 1000  # of a job; each has a folder here
KEPT_FREE = GB  # bytes of the disk here that gptctl never fills, at most 5 % of it


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Return how many bytes of each file are copied if all together may have `most`.

    Small files come first: a huge one must not keep them away.
    """
    copied = [0] * len(sizes)
    for size, number in sorted((size, number) for number, size in enumerate(sizes)):
        copied[number] = min(size, most)
        most -= copied[number]
    return copied


def room_in(folder: Path) -> int:
    """Return how many bytes may be written to the disk of a folder, which may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    disk, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return max(0, free - min(KEPT_FREE, disk // 20))
