"""TensorBoard's event files, in `<output_dir>/tensorboard`. Each attempt adds one file.

TensorBoard reads the files of a folder in the order of their names. One that begins with a purge
step voids what earlier files say of that step and later ones.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.input_files import open_own, require_regular
from trainer.trackers.tracked_run import TrackedRun

PREFIX = "events.out.tfevents."
VERSION = "brain.Event:2"
MOST_COPIED = 1 << 30  # bytes of earlier event files; a million steps have about half of that


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.where, self._event = str(folder), Event
        is_first = not _event_files(folder)
        if is_first and run.step and run.resumed:
            _copy_earlier(Path(run.resumed), folder)
        self._file = os.open(_next_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._size = 0  # of what is complete
        self._add(time.time(), file_version=VERSION)
        start = SessionLog(status=SessionLog.START)
        self._add(time.time(), step=run.step + 1, session_log=start)
        if is_first:  # once for each job: a restart has the same config
            rows = [f"| `{name}` | `{value}` |" for name, value in run.flat_config()]
            table = "\n".join(["| key | value |", "|---|---|", *rows])
            self._add(time.time(), step=run.step, summary=text("config", table))

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(at, step=step, summary=Summary(value=scalars))

    def finish(self, code: int) -> None:
        os.close(self._file)

    def _add(self, at: float, **fields: Any) -> None:
        """Append an event. tensorboardX's own writer would do so in another thread, and late."""
        data = _framed(self._event(wall_time=at, **fields).SerializeToString())
        try:
            written = os.pwrite(self._file, data, self._size)
            if written < len(data):  # no space for the rest: the next write says so
                os.pwrite(self._file, data[written:], self._size + written)
        except OSError:
            # Readers stop at a torn record, and would never see those after it.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)


def _framed(data: bytes) -> bytes:
    """A record of TFRecord's format: length, data, and a checksum of each."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def _next_file(folder: Path) -> Path:
    """A name after all others, also if this host's clock is behind that of an earlier attempt."""
    numbers = [file.name.removeprefix(PREFIX).partition(".")[0] for file in _event_files(folder)]
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return folder / f"{PREFIX}{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}"


def _copy_earlier(checkpoint: Path, folder: Path) -> None:
    """Copy the curves of the job that this one continues: here they are one with its own.

    `checkpoint` is an output folder, or a checkpoint in one. Only regular files are copied.
    """
    for place in (checkpoint, checkpoint.parent):
        files = _event_files(place / "tensorboard")
        if files and sum(file.stat().st_size for file in files) <= MOST_COPIED:
            for file in files:
                require_regular(file)
                with (
                    open(folder / file.name, "xb", opener=open_own) as copy,
                    open(file, "rb") as source,
                ):
                    shutil.copyfileobj(source, copy)
            return
