"""Writes the status file of a run: running, finished, stopped or failed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.durable import replacing
from trainer.events import record_failure
from trainer.input_files import read_object
from trainer.mesh import Mesh
from trainer.metrics import Log
from trainer.records import origin

STATUS = "status.json"
_writing = threading.Lock()  # the watchdog's thread may report a failure at the same time


@contextmanager
def status_file(folder: Path, mesh: Mesh, log: Log) -> Iterator[Callable[..., None]]:
    """Report the state of the run to the launcher; yields a function that changes it.

    The exit code is not enough: torchrun's does not distinguish a stop on request from a failure.
    """

    def report(state: str, **facts: Any) -> None:
        try:
            if mesh.is_first:
                _write(folder / STATUS, state, **facts)
        except OSError as error:
            log.warn(f"cannot write {STATUS}: {error.strerror}")

    report("running")
    try:
        yield report
    except BaseException as error:
        if mesh.world == 1:  # with more ranks, the watchdog knows which one failed and reports it
            reason = str(error) or type(error).__name__
            record_failure(folder, reason, time.monotonic() - mesh.heartbeat.since)
            report("failed", reason=reason)
        raise


def report_failure(folder: Path, reason: str, idle: float) -> None:
    """Report a failure from another thread, unless the run is not running or already over.

    `idle`: seconds since the last sign of progress.
    """
    with suppress(OSError, ValueError):  # an unreadable file is not this run's
        if read_object(folder / STATUS).get("state") == "running":
            record_failure(folder, reason, idle)
            _write(folder / STATUS, "failed", reason=reason)


def _write(file: Path, state: str, **facts: Any) -> None:
    text = json.dumps(
        {"state": state, "time": time.time(), "host": socket.gethostname(), **origin(), **facts},
        indent=1,
    )
    with _writing, replacing(file) as stream:
        stream.write(f"{text}\n".encode())
