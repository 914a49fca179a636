"""Stop requests: SIGTERM and SIGUSR1 set a flag that the training loop checks. Torch-free."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # schedulers send them before they kill a job


class StopRequest:
    """While active, a signal only sets `signal`; further signals change nothing."""

    def __init__(self) -> None:
        self.signal = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: a handler may interrupt any line, so it must not log or save.
        self.signal = self.signal or signal.Signals(number).name
