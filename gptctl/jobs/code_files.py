"""What can be copied with a job: regular files, and folders of them. Checks and copies them."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gptctl.engine.file_reading import NO_FILE, open_at_once
from trainer.named_tuple import NamedTuple

MAX_CODE = 200 << 20  # bytes of a user's script and files: more is data by mistake
MOST_FILES = 50_000  # in all listed folders: more is a data set, or a whole system, by mistake
DEEPEST = 100  # folders inside each other; Python cannot copy a thousand
MOST_NAMED = 5  # problems of one listed folder: the first ones show what is wrong with it
NOT_CODE = shutil.ignore_patterns("__pycache__", ".git", ".venv*", "*.pyc")
PSEUDO = ("/proc", "/sys")
BLOCK = 1 << 20  # bytes that are copied at once
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class CopyProblem(NamedTuple):
    """Why something cannot be copied, and what helps."""

    message: str
    hint: str


class CodeFiles:
    """Counts what would be copied, over all listed files and folders."""

    def __init__(self, skipped: Collection[str] = ()) -> None:
        self._skipped = skipped  # folders that are not copied
        self._bytes = self._files = 0
        self._is_full = False

    def problems(self, path: str) -> Iterator[CopyProblem]:
        """Report what in this file or folder cannot be copied."""
        named = 0
        for file, status in _entries(path, self._skipped):
            fault = _fault(file, status)
            if not fault and file == path and _is_pseudo(path):
                fault = f"{path} is made up by the system, not a file"
            if fault:
                named += 1
                if named <= MOST_NAMED:
                    yield CopyProblem(fault, _hint(file, path, status))
            elif status and stat.S_ISREG(status.st_mode):
                self._bytes += status.st_size
            self._files += 1
            # Do not walk further: it may be a data set, a mounted disk or /proc.
            if self._bytes > MAX_CODE or self._files > MOST_FILES:
                if not self._is_full:
                    yield self._too_much(path)
                self._is_full = True
                return

    def _too_much(self, path: str) -> CopyProblem:
        limit = f"{MAX_CODE >> 20} MiB" if self._bytes > MAX_CODE else f"{MOST_FILES:,} files"
        hint = "list only code in Launch.files; give data as a path in args"
        return CopyProblem(f"with {path}, the code to copy has more than {limit}", hint)


def _entries(path: str, skipped: Collection[str]) -> Iterator[tuple[str, os.stat_result | None]]:
    """The file itself, or everything in the folder that would be copied; None: nested too deep."""
    try:
        status = os.stat(path)
    except OSError:  # missing, or a link that leads nowhere: `preflight` reports it
        return
    yield path, status
    is_walked = stat.S_ISDIR(status.st_mode) and not _is_pseudo(path)
    for place, folders, names in os.walk(path) if is_walked else ():
        if place.count(os.sep) - path.count(os.sep) >= DEEPEST:
            folders.clear()
            yield place, None
            continue
        left_out = NOT_CODE(place, [*folders, *names])
        folders[:] = [
            name
            for name in folders
            if name not in left_out and os.path.join(place, name) not in skipped
        ]
        for name in (*folders, *(name for name in names if name not in left_out)):
            # Links inside of a folder are copied as links.
            file = os.path.join(place, name)
            try:
                yield file, os.lstat(file)
            except OSError:  # it has just been removed
                continue


def _fault(file: str, status: os.stat_result | None) -> str:
    if status is None:
        return f"{file} is nested more than {DEEPEST} folders deep"
    kind = stat.S_IFMT(status.st_mode)
    if kind in KINDS:
        return f"{file} is {KINDS[kind]}, not a file"
    needed = os.R_OK | os.X_OK if kind == stat.S_IFDIR else os.R_OK
    if kind != stat.S_IFLNK and not os.access(file, needed):
        return f"cannot read {file}: no permission"
    return ""


def _is_pseudo(path: str) -> bool:
    """Whether it is in /proc or /sys: its files have no size, and some block whoever reads them."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(place) for place in PSEUDO)


def _hint(file: str, path: str, status: os.stat_result | None) -> str:
    if status is None or _is_pseudo(path):
        return "list regular files and folders only"
    if stat.S_IFMT(status.st_mode) not in KINDS:
        return "change its permissions, or list other files"
    if file == path:
        return "list regular files and folders only"
    return "remove it from the folder, or list the files that the job needs"


class CodeCopy:
    """Copies the files of one job. They may have changed since they were checked."""

    def __init__(self) -> None:
        self._left = MAX_CODE  # bytes, counted as they are read: a file may grow, or tell no size

    def copy(self, source: str, target: str) -> str:
        """Copy a regular file with its mode; raise SpecialFileError for anything else."""
        try:
            # Never blocks, as the open of a FIFO would.
            with (
                open(source, "rb", buffering=0, opener=open_at_once) as read,
                open(target, "wb") as written,
            ):
                self._copy(source, read, written)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise shutil.SpecialFileError(f"{source} is not a regular file") from None
        shutil.copystat(source, target)
        return target

    def _copy(self, source: str, read: FileIO, written: BinaryIO) -> None:
        # None: the file has no data yet, and would block.
        while data := read.read(min(BLOCK, self._left + 1)):
            self._left -= len(data)
            if self._left < 0:
                limit = f"{MAX_CODE >> 20} MiB"
                raise shutil.SpecialFileError(f"with {source}, the code has more than {limit}")
            written.write(data)
        if data is None:
            raise shutil.SpecialFileError(f"{source} cannot be read")
