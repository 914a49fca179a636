"""The status file of a run: how it stands, and how it ended."""

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
from trainer.mesh import Mesh
from trainer.metrics import Log

STATUS = "status.json"
_writing = threading.Lock()


@contextmanager
def told_status(folder: Path, mesh: Mesh, log: Log) -> Iterator[Callable[..., None]]:
    """Leaves word for the launcher: an exit code cannot tell a run that stopped on purpose from one that failed."""

    def tell(state: str, **facts: Any) -> None:
        try:
            if mesh.is_first:
                _write(folder / STATUS, state, **facts)
        except OSError as error:
            log.warn(f"{STATUS} cannot be written: {error.strerror}")

    tell("running")
    try:
        yield tell
    except BaseException as error:
        if mesh.world == 1:  # otherwise the watchdog knows better who failed, and tells it
            tell("failed", reason=str(error) or type(error).__name__)
        raise


def tell_failure(folder: Path, reason: str) -> None:
    """From outside of the training. A run that has not begun, or has come to its end, has its word already."""
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / STATUS).read_bytes()).get("state") == "running":
            _write(folder / STATUS, "failed", reason=reason)


def _write(file: Path, state: str, **facts: Any) -> None:
    text = json.dumps(
        {"state": state, "time": time.time(), "host": socket.gethostname(), **facts}, indent=1
    )
    with _writing, replacing(file) as stream:  # another thread may tell that the run has failed
        stream.write(f"{text}\n".encode())
