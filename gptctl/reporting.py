"""Types in which lower layers report to the user: callbacks, and answers of backends.

Only the command line prints: it passes these callbacks down.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from trainer.named_tuple import NamedTuple

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


class Sooner(NamedTuple):
    """A change with which a pending job could start sooner."""

    option: str  # of gptctl submit and rerun: `--nodes 2`
    start: str  # as the scheduler expects, by its clock; empty: at once
    why: str = ""


class Waiting(NamedTuple):
    """Why a job has not started, as far as its scheduler or queue tells. None: not known."""

    reason: str  # in the word of the scheduler
    cause: str = ""  # the same in a sentence
    fix: str = ""
    never_starts: bool = False  # unless somebody changes the job or the cluster
    partition: str = ""
    nodes_wanted: int | None = None
    nodes_idle: int | None = None  # of the partition
    nodes_unusable: int | None = None  # down, drained or reserved
    nodes_total: int | None = None
    priority: int | None = None
    ahead: int | None = None  # pending jobs of the partition that come before it
    pending: int | None = None  # pending jobs of the partition, itself included
    expected_start: str = ""  # by the clock of the cluster
    sooner: tuple[Sooner, ...] = ()
    not_asked: str = ""  # why some of this is not known

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "sooner": [each._asdict() for each in self.sooner]}
