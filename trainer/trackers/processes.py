"""The processes of the trackers, as the first rank sees them.

A tracker has a process of its own: whatever it imports, prints, waits for or crashes with, the
training does not notice. The queue is the pipe to it. A write takes microseconds and never waits:
what does not fit is dropped. A process ends when its pipe is closed, so none outlives its rank.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trainer.input_files import open_own, parse_object
from trainer.trackers import INSTALL, PACKAGES, missing_packages
from trainer.trackers.tracked_run import TrackedRun

QUEUE = 1 << 20  # bytes of a pipe: about two thousand records
FLUSH_SECONDS = 20.0  # that all trackers together have at the end of a run
ORPHAN_SECONDS = 30.0  # that a tracker has whose rank was killed
OUTPUT = "trackers.log"  # what the packages print
TOLD = 3  # exit code of a tracker that could not start, and reported why
# A tracker is not a rank, although a rank started it.
OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
NOT_VALUES = ("step", "max_steps")


class Log(Protocol):
    def info(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Trackers:
    """All trackers of a run. Nothing here raises, and only `close` waits."""

    def __init__(self, names: tuple[str, ...], run: TrackedRun, log: Log) -> None:
        self._log, self._processes = log, list[TrackerProcess]()
        missing = missing_packages(names)
        for name in missing:
            log.warn(f"tracker {name} is off: {PACKAGES[name]} is not installed: {INSTALL}")
        for name in names:
            if name in missing:
                continue
            try:
                self._processes.append(TrackerProcess(name, run))
            except OSError as error:
                log.warn(f"tracker {name} is off: cannot start its process: {error.strerror}")

    def record(self, fields: Mapping[str, Any]) -> None:
        """Send the numbers of a step to every tracker."""
        values = {name: value for name, value in fields.items() if _is_number(value)}
        step = values.get("step")
        for name in NOT_VALUES:
            values.pop(name, None)
        if step is None or not values:
            return
        line = _line({"step": step, "time": round(time.time(), 3), "values": values})
        for process in self._processes:
            process.send(line)
            process.tell(self._log)

    def close(self, code: int, seconds: float | None = None) -> None:
        """End the run with this exit code. Wait at most so long for what is still in the queues."""
        for process in self._processes:
            process.end(code)
        deadline = time.monotonic() + (FLUSH_SECONDS if seconds is None else seconds)
        for process in self._processes:
            is_done = process.wait(deadline - time.monotonic())
            process.tell(self._log)
            if process.dropped:
                self._log.warn(
                    f"tracker {process.name} is too slow: {process.dropped} of {process.sent} "
                    "records were dropped; metrics.jsonl has all of them"
                )
            if not is_done and seconds is None:
                self._log.warn(
                    f"tracker {process.name} did not finish within {FLUSH_SECONDS:g} seconds: "
                    "its last records may be missing there; metrics.jsonl has all of them"
                )
                process.kill()


class TrackerProcess:
    """The process of one tracker, the pipe to it, and the pipe on which it reports."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.sent, self.dropped = name, 0, 0
        theirs, self._queue = os.pipe()
        self._reports, their_reports = os.pipe()
        for pipe in (self._queue, self._reports):
            os.set_blocking(pipe, False)
        with suppress(OSError):  # a user may have used up what all pipes together may have
            fcntl.fcntl(self._queue, fcntl.F_SETPIPE_SZ, QUEUE)
        self._is_lost = False
        self._rest = b""  # of a report that has not arrived completely
        try:
            self._start_with(run)
            self._process = _start(name, run.folder, theirs, their_reports)
        except OSError:
            os.close(self._queue)
            os.close(self._reports)
            raise
        finally:
            os.close(theirs)
            os.close(their_reports)

    def _start_with(self, run: TrackedRun) -> None:
        line = _line({**run._asdict(), "folder": str(run.folder.absolute())})
        if os.write(self._queue, line) < len(line):
            raise OSError(0, "the config does not fit into a pipe")

    def send(self, line: bytes) -> None:
        self.sent += 1
        # A pipe takes all or nothing of what is not longer than this.
        try:
            if len(line) <= select.PIPE_BUF and self._queue >= 0:
                os.write(self._queue, line)
                return
        except BlockingIOError:
            pass
        except OSError:  # the process has ended, and said why
            return
        self.dropped += 1

    def tell(self, log: Log) -> None:
        """Log what the tracker has reported."""
        # Nothing is read after the end of its output, nor before there is any.
        with suppress(BlockingIOError):
            while data := os.read(self._reports, 1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            # Python itself may have printed there, before the process could redirect its output.
            with suppress(ValueError):
                report = parse_object(line)
                say = log.warn if report.get("level") == "warning" else log.info
                say(str(report.get("text")))
        if self._process.poll() not in (None, 0, TOLD) and not self._is_lost:
            self._is_lost = True
            code = self._process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.warn(f"tracker {self.name} ended unexpectedly ({how}): see {OUTPUT}")

    def end(self, code: int) -> None:
        """Say how the run ended, and close the queue."""
        with suppress(OSError):
            os.write(self._queue, _line({"end": code}))
        os.close(self._queue)
        self._queue = -1

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        # Also what it started: its session has its number.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _start(name: str, folder: Path, queue: int, reports: int) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if key not in OF_RANKS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        output = open_own(folder / OUTPUT, flags)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.trackers", name],
            stdin=queue,
            stdout=reports,
            stderr=output,
            env=environment,
            # Signals to a terminal's processes, such as Ctrl-C, are for the ranks.
            start_new_session=True,
        )
    finally:
        os.close(output)


def _is_number(value: object) -> bool:
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and math.isfinite(value)  # type: ignore[arg-type]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
