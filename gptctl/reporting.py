"""Types of the callbacks through which lower layers report to the user.

Only the command line prints: it passes these callbacks down.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

Say = Callable[[str], None]  # shows a line of status
Progress = Callable[[int], None]  # takes the number of bytes received since the last call
ShowProgress = Callable[[str, int], AbstractContextManager[Progress]]  # title, total bytes


class FetchedFolder(NamedTuple):
    """A folder of a job, as its nodes see it, and its copy on this machine."""

    remote: str
    local: str


class FetchOptions(NamedTuple):
    """What `gptctl fetch` copies, and how much of it at most."""

    target: str | None  # the folder; None: the job's own
    checkpoints: bool
    max_size: int  # bytes that are copied
    max_files: int  # files and folders of each host
    only: FetchedFolder | None = None  # this folder and nothing else


class Fetched(NamedTuple):
    """The result of `gptctl fetch`: what of the job is on this machine now."""

    files: int
    bytes: int
    folder: str
    new_files: int  # of these, what this fetch copied
    new_bytes: int
    not_copied: int = 0  # files, folders and hosts that were left out
