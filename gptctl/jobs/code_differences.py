"""How the code that two jobs have frozen differs: which files, and in which lines.

The files were written by users, and may have been damaged since: everything is read with limits.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gptctl.engine.file_reading import DamagedFile, load_bytes, notice_error, open_at_once
from gptctl.jobs.code_files import BLOCK, MAX_CODE, MOST_FILES, NOT_CODE
from gptctl.text import count

LARGEST_SHOWN = 1 << 20  # bytes of a file whose lines are compared
MOST_LINES = 5000  # of a file whose lines are compared: more may take minutes
MOST_SHOWN = 5000  # lines of all differences together
LONGEST_LINE = 500  # characters


def code_digests(folder: Path) -> dict[str, str] | None:
    """The size and checksum of each file of a job's code, by its path; None if there is no code."""
    try:
        if not folder.is_dir():
            return None
    except OSError as error:  # the folder above cannot be read
        notice_error(folder, error)
        return None
    left, found = MAX_CODE, dict[str, str]()
    for name, path in _files(folder):
        # Links were copied as links.
        if os.path.islink(path):
            found[name] = f"link to {os.readlink(path)}"
            continue
        try:
            size, digest = _digest(path, left)
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
            continue
        left -= size
        found[name] = f"{count(size, 'byte')}, sha256 {digest[:12]}"
    return found


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """The files with their paths in the folder, sorted; not more than can be submitted."""
    names = []
    for place, folders, files in os.walk(folder):
        left_out = NOT_CODE(place, [*folders, *files])
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in left_out]
        names += [os.path.join(place, name) for name in {*files, *links} - left_out]
        if len(names) > MOST_FILES:
            break
    for path in sorted(names)[:MOST_FILES]:
        yield os.path.relpath(path, folder), path


def _digest(path: str, most: int) -> tuple[int, str]:
    """The size of a file and its checksum, of at most so many bytes. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0, opener=open_at_once) as stream:
        while data := stream.read(min(BLOCK, max(0, most - size))):
            digest.update(data)
            size += len(data)
        return max(size, os.fstat(stream.fileno()).st_size), digest.hexdigest()


def code_diff(a: Path, b: Path, names: list[str], labels: tuple[str, str]) -> list[str]:
    """The lines of a unified diff of these files, within the limits."""
    lines: list[str] = []
    for name in names:
        lines += _file_diff(a / name, b / name, [f"{label}/{name}" for label in labels])
        if len(lines) > MOST_SHOWN:
            return [*lines[:MOST_SHOWN], f"… the rest is left out: more than {MOST_SHOWN:,} lines"]
    return lines


def _file_diff(a: Path, b: Path, titles: list[str]) -> list[str]:
    one, other = _lines(a), _lines(b)
    # A name may contain a line break.
    titles = [" ".join(title.split()) for title in titles]
    for title, found in zip(titles, (one, other)):
        if isinstance(found, str):
            return [f"--- {titles[0]}", f"+++ {titles[1]}", f"… {title} {found}"]
    assert isinstance(one, list)
    assert isinstance(other, list)
    names = [title if found else os.devnull for title, found in zip(titles, (one, other))]
    found = [
        line[:LONGEST_LINE]
        for line in difflib.unified_diff(one, other, names[0], names[1], lineterm="")
    ]
    return found or [f"--- {titles[0]}", f"+++ {titles[1]}", "… the lines are the same"]


def _lines(file: Path) -> list[str] | str:
    """The lines of a text, none if it is missing; or why they cannot be compared."""
    try:
        data = load_bytes(file, LARGEST_SHOWN)
    except FileNotFoundError:
        return []
    except (OSError, DamagedFile) as error:
        return f"cannot be shown: {getattr(error, 'strerror', None) or error}"
    if b"\0" in data:
        return "is not a text"
    # Not splitlines: it also splits at characters that are no line breaks in Python.
    lines = data.decode(errors="replace").removesuffix("\n").split("\n")
    if len(lines) > MOST_LINES:
        return f"has more than {MOST_LINES:,} lines"
    return lines if data else []
