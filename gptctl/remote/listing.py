"""List folders of hosts over SFTP, whatever the connection."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

RunCommand = Callable[[Sequence[str]], Any]  # runs a command on the host; its result has `out`


class Entry(NamedTuple):
    """A file or folder on a host."""

    name: str
    mode: int
    size: int
    changed: int


def listed(files: Any, run: RunCommand, folder: str) -> list[Entry]:
    """List a folder, including names that are not UTF-8; return nothing if it is missing."""
    try:
        # As bytes: the folder itself may have a name that is not UTF-8.
        found = files.listdir_attr(os.fsencode(folder))
    except FileNotFoundError:
        return []
    # paramiko cannot decode a name that is not UTF-8.
    except UnicodeDecodeError:
        return _listed_by_find(run, folder)
    return [
        Entry(each.filename, each.st_mode or 0, each.st_size or 0, each.st_mtime or 0)
        for each in found
    ]


def _listed_by_find(run: RunCommand, folder: str) -> list[Entry]:
    depth = ["-mindepth", "1", "-maxdepth", "1"]
    words = ["find", folder, *depth, "-printf", r"%f\0%y\0%s\0%Ts\0"]
    fields = os.fsdecode(run(words).out).split("\0")
    kinds = {"f": stat.S_IFREG, "d": stat.S_IFDIR}
    # Four fields for each entry; the rest after the last one is empty.
    each = zip(*(fields[start::4] for start in range(4)))
    return [
        Entry(name, kinds.get(kind, 0), int(size), int(changed))
        for name, kind, size, changed in each
    ]
