"""Log files on local paths.

Descriptors stay open, so that a file that was renamed or removed is still read to its end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gptctl.engine.contract import ATTEMPT_NAME, OUTCOME
from gptctl.engine.file_reading import open_at_once, read_bytes
from gptctl.engine.run_folder import RunFolder
from gptctl.logs.files import Kind, LogFile, kind_of

if TYPE_CHECKING:
    from gptctl.logs.log_watch import LogWatch

SPARE_DESCRIPTORS = 32  # left for everything else this process opens
# Exactly the names that gptctl writes: other files in these folders are ignored.
_FOLDER = re.compile(ATTEMPT_NAME)
_RECORD = re.compile(rf"ranks\.\d{{1,7}}\.jsonl|node\.\d{{1,7}}\.exit|{OUTCOME}", re.ASCII)


class Descriptors:
    """Open files by identity. If there are too many, the oldest are closed."""

    def __init__(self, path_of: Callable[[LogFile], str]) -> None:
        self.by_identity: dict[tuple[int, ...], int] = {}
        self._path_of = path_of
        self._most = 0

    def read(self, file: LogFile, offset: int, size: int) -> bytes:
        try:
            descriptor = self.by_identity.get(file.identity)
            if descriptor is None:
                descriptor = self._opened(file)
            return b"" if descriptor is None else os.pread(descriptor, size, offset)
        except OSError:  # removed, or the file system is unreachable for now: try on the next tick
            return b""

    def next_data(self, file: LogFile, offset: int) -> int:
        """The first offset from here on at which the file system has stored anything."""
        descriptor = self.by_identity.get(file.identity)
        if descriptor is None:
            return offset
        try:
            return os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            # Nothing but a gap; other file systems have no such call.
            return max(offset, file.size) if error.errno == errno.ENXIO else offset

    def _opened(self, file: LogFile) -> int | None:
        if len(self.by_identity) >= self._most:
            self._make_room()
        descriptor = _open_exactly(self._path_of(file), file.identity)
        if descriptor is not None:
            self.by_identity[file.identity] = descriptor
        return descriptor

    def release(self, file: LogFile) -> None:
        self._close(file.identity)

    def _close(self, identity: tuple[int, ...]) -> None:
        descriptor = self.by_identity.pop(identity, None)
        if descriptor is not None:
            os.close(descriptor)

    def _make_room(self) -> None:
        if not self._most:
            self._most = max(4, _raised_limit() - SPARE_DESCRIPTORS)
        # A dict keeps insertion order: its first key is the file opened first.
        while len(self.by_identity) >= self._most:
            self._close(next(iter(self.by_identity)))


def _raised_limit() -> int:
    """Raise the limit of open files if possible, and return it."""
    import resource

    # The usual soft limit of 1024 is less than the ranks of a large job.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wish = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wish:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wish, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft


def _open_exactly(path: str, identity: tuple[int, ...]) -> int | None:
    """Open the file with this identity, even if it was renamed in its folder."""
    if (descriptor := _open_if_same(path, identity)) is not None:
        return descriptor
    # Log rotation renames a file between the scan and the read: search for its inode.
    with os.scandir(os.path.dirname(path)) as entries:
        moved = [entry.path for entry in entries if entry.inode() == identity[1]]
    return _open_if_same(moved[0], identity) if moved else None


def _open_if_same(path: str, identity: tuple[int, ...]) -> int | None:
    try:
        descriptor = open_at_once(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) == identity:
        return descriptor
    os.close(descriptor)
    return None


class LocalLogFiles:
    """The logs of a job in `log_dir`, and the records of its ranks in `run_dir`."""

    def __init__(self, log_dir: Path, run_dir: Path) -> None:
        self._log_dir, self._run_dir = log_dir, run_dir
        self._descriptors = Descriptors(self._path)
        # Not methods that pass the call on: one of them is called for every line.
        self.read, self.next_data = self._descriptors.read, self._descriptors.next_data
        self.release = self._descriptors.release
        # The files as last seen, by attempt and name.
        self._last: dict[int, dict[str, LogFile]] = {}
        self._watch: LogWatch | None = None

    def _path(self, file: LogFile) -> str:
        return f"{self._log_dir}/attempt-{file.attempt}/{file.name}"

    def attempts(self) -> list[int]:
        # An attempt that failed before its first log line has records only.
        return sorted({*_attempts(self._log_dir), *_attempts(self._run_dir)})

    def scan(self, first: int = 0) -> list[LogFile]:
        if self._watch:
            self._watch.begin_scan()
        wanted = [attempt for attempt in _attempts(self._log_dir) if attempt >= first]
        if self._watch:
            self._watch.cover(wanted)
        before = self._last
        self._last = {attempt: self._scan_folder(attempt) for attempt in wanted}
        if self._watch:
            self._watch.end_scan(before, self._last)
        return [file for files in self._last.values() for file in files.values()]

    def written(self) -> list[LogFile] | None:
        places = self._watch.written() if self._watch else None
        if places is None:
            return None
        files = []
        try:
            for attempt, name in sorted(places):  # lines of earlier attempts come first
                if file := self._last.get(attempt, {}).get(name):
                    now = self._updated(file) or _described(
                        self._path(file), attempt, file.kind, file.number
                    )
                    # If it was replaced after the reports were read, the next ones say so.
                    if now and now.identity == file.identity:
                        self._last[attempt][name] = now
                        files.append(now)
        except OSError:  # a stale file of a network file system: a scan finds the others
            return None
        return files

    def wait(self, seconds: float) -> None:
        from gptctl.logs.log_watch import LogWatch

        self._watch = self._watch or LogWatch(str(self._log_dir))
        self._watch.wait(seconds)

    def records(self, attempt: int) -> dict[str, bytes]:
        found = {}
        with suppress(OSError):
            for path in sorted((self._run_dir / f"attempt-{attempt}").iterdir()):
                if _RECORD.fullmatch(path.name) and (data := read_bytes(path)):
                    found[path.name] = data
        return RunFolder(self._run_dir).own_records(attempt, found)

    def _scan_folder(self, attempt: int) -> dict[str, LogFile]:
        before, now = self._last.get(attempt, {}), {}
        with suppress(OSError), os.scandir(f"{self._log_dir}/attempt-{attempt}") as entries:
            for entry in entries:
                name = entry.name
                file = before.get(name)
                # The inode shows whether the name still belongs to the same file.
                same = file if file and file.identity[1] == entry.inode() else None
                if same and (updated := self._updated(same)):
                    now[name] = updated
                elif (held := kind_of(name)) and (file := _described(entry.path, attempt, *held)):
                    now[name] = file
        return now

    def _updated(self, file: LogFile) -> LogFile | None:
        """The file with its size of now, if it is open."""
        descriptor = self._descriptors.by_identity.get(file.identity)
        if descriptor is None:
            return None
        # lseek on an open file costs a tenth of a stat.
        size = os.lseek(descriptor, 0, os.SEEK_END)
        return file if size == file.size else file.grown(size, time.time())


class LocalFile:
    """One log file by its path, as a job with a single file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path.absolute())
        descriptors = Descriptors(lambda file: self._path)
        self.read, self.next_data = descriptors.read, descriptors.next_data
        self.release = descriptors.release

    def attempts(self) -> list[int]:
        return [0]

    def scan(self, first: int = 0) -> list[LogFile]:
        file = _described(self._path, 0, "file", 0)
        return [file] if file else []

    def written(self) -> list[LogFile] | None:
        return None

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def records(self, attempt: int) -> dict[str, bytes]:
        return {}


def _described(path: str, attempt: int, kind: Kind, number: int) -> LogFile | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # Folders and pipes may have the name of a log.
    if not stat.S_ISREG(status.st_mode):
        return None
    identity = (status.st_dev, status.st_ino)
    return LogFile(
        attempt, kind, number, os.path.basename(path), status.st_size, status.st_mtime, identity
    )


def _attempts(folder: Path) -> list[int]:
    # A pending job has no folder yet.
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _FOLDER.fullmatch(name)))
