"""The rows of jobs that have ended, kept from one `gptctl list` to the next.

Of thousands of jobs few change. A row is used again as long as every file that it was read from
has the same time and size; without this file, or with a damaged one, all rows are read again.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl import __version__
from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.contract import RESULT
from gptctl.engine.file_reading import DamagedFile, load_bytes, load_own_value
from gptctl.engine.job_result import FINAL, LOST
from gptctl.jobs.store import ENDED, LABELS, REMOVED, JobRecord, Store
from trainer.checkpoint_names import METRICS

FILE = "listed.json"  # beside the folder of the records
FORM = f"2 {__version__}"  # another version may make other rows
MOST_BYTES = 256 << 20
MOST_JOBS = 50_000
LEAST_NEW = 20  # rows; reading fewer again costs less than writing all
SETTLED = 2.0  # seconds after which a file that changes again has another time
Stamp = list["int | None"]  # times and sizes of files


class ListedJob(NamedTuple):
    record: JobRecord
    row: dict[str, Any]
    files: list[str]  # with numbers of the training, besides the files that every job has
    stamp: Stamp


class ListedJobs:
    """The rows that are still true, and the new ones of this command."""

    def __init__(self, store: Store) -> None:
        self._file = store.folder.parent / FILE
        # Before anything is read: what changes later has another stamp the next time.
        self._stamps = _stamps_in(store.folder)
        self.known = {
            each.record.id: each
            for each in _load(self._file)
            if each.stamp == self._stamp(each.record, each.files)
        }
        self._candidates: dict[str, ListedJob] = {}
        self._num_new = 0

    def prepare(self, records: Iterable[JobRecord]) -> None:
        """Note what the rows of these jobs depend on, before they are read."""
        for record in records:
            if record.id not in self.known:
                files = _measured_files(record)
                stamp = self._stamp(record, files)
                self._candidates[record.id] = ListedJob(record, {}, files, stamp)

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the new rows that cannot change unless a file does."""
        latest = 1e9 * (time.time() - SETTLED)
        for row in rows:
            found = self._candidates.get(row["job"])
            if found and _is_settled(found, row, latest):
                self.known[row["job"]] = found._replace(row=dict(row))
                del self._candidates[row["job"]]
                self._num_new += 1
        if self._num_new >= LEAST_NEW:
            _write(self._file, list(self.known.values())[-MOST_JOBS:])

    def _stamp(self, record: JobRecord, files: Sequence[str]) -> Stamp:
        own = self._stamps.get(f"{record.id}.json", (None, None))
        folder = _changed(record.local_dir)
        # Only a job without a folder is told by the history; and this list may write it.
        notes = (REMOVED, LABELS) if folder else (REMOVED, LABELS, ENDED)
        others = [self._stamps.get(f"{record.id}{suffix}", (None,))[0] for suffix in notes]
        # Not os.path.join, which takes as long as asking for the time.
        return [
            *own,
            *others,
            folder,
            _changed(f"{record.local_dir}/{RESULT}"),
            *map(_changed, files),
        ]


def _is_settled(found: ListedJob, row: Mapping[str, Any], latest: float) -> bool:
    from gptctl.jobs.state import needs_backend

    is_final = row["state"] in FINAL and row["state"] != LOST
    is_old = all(each is None or each < latest for each in found.stamp)
    return is_final and is_old and not needs_backend(found.record)


def _stamps_in(folder: Path) -> dict[str, tuple[int, int]]:
    stamps = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                stamps[entry.name] = (status.st_mtime_ns, status.st_size)
    return stamps


def _changed(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _measured_files(record: JobRecord) -> list[str]:
    """The files that tell how far a job came; see `training_progress.py`."""
    if record.output_dir:
        return [os.path.join(record.output_dir, name) for name in (METRICS, "status.json")]
    from gptctl.jobs.training_progress import step_logs

    return list(map(str, step_logs(record)))


def _load(file: Path) -> list[ListedJob]:
    try:
        head, _, body = load_bytes(file, MOST_BYTES).partition(b"\n")
        if head != _head(body):
            return []
    except (OSError, DamagedFile):
        return []
    found = load_own_value(body)
    return [
        ListedJob(JobRecord(**record), row, files, stamp) for record, row, files, stamp in found
    ]


def _head(body: bytes) -> bytes:
    return f"{FORM} {zlib.crc32(body)}".encode()


def _write(file: Path, jobs: Sequence[ListedJob]) -> None:
    values = [(_plain(each.record), each.row, each.files, each.stamp) for each in jobs]
    body = json.dumps(values, separators=(",", ":")).encode()
    # Without this file everything works, only slower.
    with suppress(OSError), private_files(), replacing(file) as stream:
        stream.write(_head(body) + b"\n" + body)


def _plain(record: JobRecord) -> dict[str, Any]:
    """The fields that differ from their defaults: half of them, and so half to read."""
    values, defaults = record._asdict(), JobRecord._field_defaults
    chosen = {n: v for n, v in values.items() if n not in defaults or v != defaults[n]}
    return {n: dict(v) if isinstance(v, Mapping) else v for n, v in chosen.items()}
