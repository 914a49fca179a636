"""Ending a run on purpose: signals are remembered for the training loop, and a status file says how it ended."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainer.checkpoint.manifest import write_durably

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Between entering and leaving, a signal only leaves a note; a second one changes nothing."""

    def __init__(self) -> None:
        self.signal = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name


def write_status(file: Path, state: str, **facts: Any) -> None:
    """`state` is running, stopped (on purpose, everything saved), finished or failed."""
    text = json.dumps({"state": state, "time": time.time(), "host": socket.gethostname(), **facts}, indent=1)
    write_durably(file, f"{text}\n".encode())


STATUS = "status.json"
