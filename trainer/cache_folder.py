"""Where files that can be built again are kept, such as index maps. Torch-free.

One folder for all ranks of a node: next to the data, or the user's cache folder if the data is in a
folder that cannot be written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

WHERE_TO_WRITE = "set Data.cache_dir to a folder that all ranks can write to"


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's cache folder, as the XDG specification defines it: relative paths do not count."""
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "gptctl"
    try:
        return Path.home() / ".cache" / "gptctl"
    except RuntimeError:  # a container without HOME, in which the user has no account
        return None


def cache_folders(data: Path, cache_dir: str | None) -> list[Path]:
    """The folders for what is computed from files in `data`, the preferred one first."""
    if cache_dir:
        return [_own_folder(Path(cache_dir), data)]
    cache = user_cache()
    return [data, _own_folder(cache, data)] if cache else [data]


def _own_folder(cache: Path, data: Path) -> Path:
    # Files of different folders may have the same names.
    path = os.path.abspath(data)
    return cache / f"{os.path.basename(path)}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def can_write(folder: Path) -> bool:
    """Whether files can be created in a folder, or in the nearest parent of a missing one."""
    # os.path.exists: False, not an error, without permission to look.
    places = (place for place in (folder, *folder.parents) if os.path.exists(place))
    nearest = next(places, Path("/"))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
