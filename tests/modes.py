"""Which files others can read. For tests that walk what a job leaves on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def not_private(*folders: Path) -> list[str]:
    """Return files that are not 0600 (0700 if executable) and folders that are not 0700."""
    found = []
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & 0o077:
                found.append(f"{stat.filemode(mode)} {path}")
    return found
