"""The status file of a run: how it stands, and how it ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.durable import replacing
from trainer.mesh import Mesh
from trainer.metrics import Log

STATUS = "status.json"


@contextmanager
def told_status(folder: Path, mesh: Mesh, log: Log) -> Iterator[Callable[..., None]]:
    """Leaves word for the launcher: an exit code cannot tell a run that stopped on purpose from one that failed."""

    def tell(state: str, **facts: Any) -> None:
        text = json.dumps({"state": state, "time": time.time(), "host": socket.gethostname(), **facts}, indent=1)
        try:
            if mesh.is_first:
                with replacing(folder / STATUS) as stream:
                    stream.write(f"{text}\n".encode())
        except OSError as error:
            log.warn(f"{STATUS} cannot be written: {error.strerror}")

    tell("running")
    try:
        yield tell
    except BaseException as error:
        tell("failed", reason=str(error) or type(error).__name__)
        raise
