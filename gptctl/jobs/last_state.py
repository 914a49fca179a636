"""The last state in which a job was seen: shown while its hosts or its scheduler do not answer."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import NamedTuple

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import is_time, read_json
from gptctl.engine.job_result import PENDING, RUNNING
from gptctl.jobs.store import JobRecord
from gptctl.text import clock_time

LAST_STATE = "last-state.json"  # in the job's folder on this machine
REMEMBER_EVERY = 60.0  # seconds after which an unchanged state is recorded again


class LastState(NamedTuple):
    state: str
    seen: float  # when that was, by the clock of this machine

    @property
    def age(self) -> float:
        # The clock may have been set back.
        return max(0.0, time.time() - self.seen)


def remember(record: JobRecord, state: str) -> None:
    """Keep the state of a job that has just been seen; a job that has ended keeps its result."""
    if state not in (PENDING, RUNNING) or not record.run_folder.is_dir():
        return
    known = last_state(record)
    # A time in the future: the clock was set back.
    if known and known.state == state and 0 <= time.time() - known.seen < REMEMBER_EVERY:
        return
    text = json.dumps({"state": state, "seen": time.time()})
    # A full disk must not keep gptctl from showing the state.
    with suppress(OSError), private_files(), replacing(record.run_folder / LAST_STATE) as file:
        file.write(text.encode())


def last_state(record: JobRecord) -> LastState | None:
    known = read_json(record.run_folder / LAST_STATE) or {}
    if known.get("state") not in (PENDING, RUNNING) or not is_time(known.get("seen")):
        return None
    return LastState(known["state"], known["seen"])


def last_state_text(record: JobRecord) -> str:
    """The end of a message that explains why the state is unknown."""
    known = last_state(record)
    return f"; last known state: {known.state} at {clock_time(known.seen)}" if known else ""
