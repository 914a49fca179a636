"""The events of a job: one line of JSON each in events.jsonl, appended by the engine.

The trainer appends its own events beside its metrics, in the same form; `jobs/timeline.py` reads
both. Events are for people: failing to write one never disturbs the job.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import private
from gptctl.engine.contract import ALIVE, EVENTS
from gptctl.engine.file_reading import append_line, read_json

ALIVE_EVERY = 5.0  # seconds between two signs of life

# What the engine writes; `trainer/events.py` has the others.
STARTED = "started"  # the engine runs: from here on, the nodes are this job's
ATTEMPT = "attempt"  # an attempt begins
SIGNAL = "signal"  # the engine was asked to stop
FAILURE = "failure"  # an attempt failed
REQUEUE = "requeue"  # the scheduler was asked to start the job again later
END = "end"  # the job has ended, and nothing of it is left on the nodes


class EventLog:
    """Appends the events of one job, and shows from time to time that its engine is alive."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown = folder, float("-inf")
        self.attempt = -1  # of the events that follow

    def add(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "attempt": self.attempt, **_now(), **facts})
        # A full disk must not end the job.
        with suppress(OSError):
            append_line(self._folder / EVENTS, line)

    def started(self, **facts: Any) -> None:
        """Add the start of this engine, with the last sign of the one before: it may be dead."""
        seen = read_json(self._folder / ALIVE)
        self.add(STARTED, **facts, **({"seen": seen} if seen else {}))

    def show_alive(self) -> None:
        """Record the time, at most every few seconds: a killed engine cannot tell when it ended."""
        if time.monotonic() - self._shown < ALIVE_EVERY:
            return
        self._shown = time.monotonic()
        file = self._folder / ALIVE
        part = file.with_name(f"{ALIVE}.part")
        # Not on disk at once, as other records are: after a crash, an older sign is good enough.
        with suppress(OSError):
            with open(part, "w", encoding="utf-8", opener=private) as stream:
                stream.write(json.dumps({"attempt": self.attempt, **_now()}) + "\n")
            os.replace(part, file)


def _now() -> dict[str, Any]:
    # The steady clock shows how much time passed, even if somebody sets the other one.
    return {
        "time": round(time.time(), 3),
        "clock": round(time.monotonic(), 3),
        "host": os.uname().nodename,
    }
