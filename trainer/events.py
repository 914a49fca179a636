"""What happens in a run besides its steps, recorded by the first rank in `events.jsonl`.

The launcher records its own events in the same form in the folder of the job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.event_names import EVENTS, FAILED, LAST_STEP
from trainer.records import Records


class Events:
    """The events of a run. Only the first rank records them."""

    def __init__(self, folder: Path, is_first: bool, warn: Callable[[str], None]) -> None:
        self._records = Records(folder / EVENTS, "events are", warn) if is_first else None
        self._last_step = _open_last_step() if is_first else None

    def add(self, event: str, **facts: Any) -> None:
        if self._records:
            self._records.add(_event(event, **facts))

    def completed(self, step: int) -> None:
        """Remember the last step: a run that is killed cannot say how far it came.

        One write of a few bytes to the page cache in every step.
        """
        if self._last_step is not None:
            line = f"{step:15d} {time.time():17.3f} {time.monotonic():17.3f}\n"
            with suppress(OSError):
                os.pwrite(self._last_step, line.encode(), 0)


NO_EVENTS = Events(Path(), False, lambda text: None)  # of a rank that records nothing


def _event(event: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "host": socket.gethostname(), **facts}


def record_failure(folder: Path, reason: str, idle: float) -> None:
    """Record why the run fails. Any thread may do it, and any rank if the first one is lost."""
    records = Records(folder / EVENTS, "events are", lambda text: None)
    records.add(_event(FAILED, reason=reason, idle=round(idle, 3)))


def _open_last_step() -> int | None:
    folder = os.environ.get("GPTCTL_ATTEMPT_DIR", "")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(os.path.join(folder, LAST_STEP), flags, 0o600) if folder else None
    return None
