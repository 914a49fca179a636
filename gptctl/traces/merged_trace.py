"""Write the traces of several ranks as one trace: in Perfetto, each rank is a group of processes.

Ranks have equal process ids (GPU 0 of every host has the id 0) and equal ids of arrows, so both get
new numbers. The clocks of hosts differ: times are those of each host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gptctl.engine.atomic_files import replacing
from gptctl.engine.file_reading import DamagedFile
from gptctl.traces.trace_reader import Event, Read, TraceReader

MOST_PROCESSES = 100_000  # of all ranks together; a rank has about four
IDS = 1 << 32  # ids of arrows per rank
LARGEST_BASE = 1 << 63  # nanoseconds since the epoch
BASE = "baseTimeNanoseconds"


def write_merged(files: Mapping[int, Path], output: Path, done: Read = lambda size: None) -> int:
    """Write one trace of all these ranks; return the number of events."""
    merged = _Merged()
    with replacing(output) as stream:
        stream.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for rank, file in files.items():
            merged.add(rank, file, stream, done)
        stream.write(b"\n]}\n")
    return merged.num_events


class _Merged:
    def __init__(self) -> None:
        self.num_events = 0
        self._pids: dict[tuple[int, str], int] = {}
        self._base: int | None = None  # of the first trace: its times are not changed

    def add(self, rank: int, file: Path, stream: BinaryIO, done: Read) -> None:
        reader = TraceReader(file, done)
        # A generator: the base of the times stands before the events, and is known after the first.
        for event in reader.events():
            shift = self._shift(reader.facts.get(BASE))
            text = _json(self._changed(rank, event, shift))
            separator = ",\n" if self.num_events else "\n"
            stream.write(f"{separator}{text}".encode())
            self.num_events += 1

    def _shift(self, base: Any) -> float:
        """Microseconds to add to the times of a trace."""
        is_known = isinstance(base, int) and 0 < base < LARGEST_BASE
        if self._base is None:
            self._base = base if is_known else 0
        return (base - self._base) / 1000 if is_known and self._base else 0.0

    def _changed(self, rank: int, event: Event, shift: float) -> Event:
        changed = dict(event)
        if "pid" in event:
            changed["pid"] = self._pid(rank, event["pid"])
        number, at = event.get("id"), event.get("ts")
        if isinstance(number, int) and 0 <= number < IDS:
            changed["id"] = rank * IDS + number
        if shift and isinstance(at, (int, float)):
            changed["ts"] = at + shift
        if event.get("ph") == "M" and event.get("name") == "process_name":
            changed["args"] = {"name": f"rank {rank}: {_name_in(event)}"}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            changed["args"] = {"sort_index": changed.get("pid", 0)}  # rank by rank
        return changed

    def _pid(self, rank: int, pid: Any) -> int:
        # Also texts: torch calls one of its processes "Spans".
        key = (rank, repr(pid)[:100])
        if key not in self._pids and len(self._pids) >= MOST_PROCESSES:
            raise DamagedFile(f"more than {MOST_PROCESSES:,} processes")
        return self._pids.setdefault(key, len(self._pids) + 1)


def _json(event: Event) -> str:
    """JSON has no infinity, which a number such as 1e999 becomes when it is read."""
    try:
        try:
            return json.dumps(event, allow_nan=False)
        except ValueError:
            return json.dumps(_finite(event), allow_nan=False)
    except RecursionError:
        raise DamagedFile("nested too deep") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _name_in(event: Event) -> str:
    arguments = event.get("args")
    name = arguments.get("name") if isinstance(arguments, dict) else None
    return name if isinstance(name, str) else "process"
