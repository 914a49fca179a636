"""Files to which a run appends records, one line of JSON each: metrics, step times, events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.input_files import open_own


class Records:
    """Appends to one file. If that fails, says so once, and then records nothing more."""

    def __init__(self, file: Path, what: str, warn: Callable[[str], None]) -> None:
        self.file: Path | None = file
        self._what, self._warn, self._origin = what, warn, origin()

    def add(self, fields: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        # JSON has no nan and inf.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        # The steady clock shows how much time passed, even if somebody sets the other one.
        now = {"time": round(time.time(), 3), "clock": round(time.monotonic(), 3)}
        try:
            # Opened for every line, so that nothing stays in a buffer if the run is killed.
            # A FIFO would block the training, and a link lead to another file.
            with open(self.file, "a", encoding="utf-8", opener=open_own) as stream:
                stream.write(json.dumps({**finite, **now, **self._origin}) + "\n")
        except OSError as error:  # a full disk must not stop the run
            self._warn(
                f"cannot write {self.file} ({error.strerror}): {self._what} no longer recorded"
            )
            self.file = None


def origin() -> dict[str, Any]:
    """The job and the attempt that this run belongs to, if a launcher started it."""
    # Several attempts, and jobs that share an output folder, write to the same files.
    job, attempt = (os.environ.get(name, "") for name in ("GPTCTL_JOB", "GPTCTL_ATTEMPT"))
    return {"job": job, "attempt": int(attempt)} if job and attempt.isdecimal() else {}
