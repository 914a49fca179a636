"""Which damaged files were named before, so that each is named once and not by every command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import parse_json, read_bytes
from gptctl.spec.resources import home
from gptctl.text import count

MOST_REMEMBERED = 500  # files, so that the list stays small; the oldest are forgotten first
MOST_NAMED = 5  # by one command: after a disk failure there may be thousands


def new_notes(noticed: Mapping[str, str]) -> list[str]:
    """Messages about the damaged files that have not been named yet; remember them."""
    file = home() / "damaged" / "named.json"
    known = parse_json(read_bytes(file)) or {}
    now = {path: _version(path) for path in noticed}
    new = [path for path in noticed if known.get(path) != now[path]]
    if not new:
        return []
    # The others are named by the next commands.
    named = {path: now[path] for path in noticed if path not in new[MOST_NAMED:]}
    kept = {path: version for path, version in known.items() if path not in now} | named
    text = json.dumps(dict(list(kept.items())[-MOST_REMEMBERED:]))
    # A home that is read-only or full must not stop the command.
    with suppress(OSError), private_files():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(text.encode())
    notes = [f"ignored {path}: {one_line(noticed[path])}" for path in new[:MOST_NAMED]]
    more = len(new) - MOST_NAMED
    return [*notes, f"ignored {count(more, 'more damaged file')}"] if more > 0 else notes


def _version(path: str) -> str:
    """What changes when the file is replaced or written again."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    return f"{status.st_mtime_ns}:{status.st_size}"
