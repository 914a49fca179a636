"""Find the traces in a folder. Everything but their names is left to those who read them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.trace_files import MEMORY, TraceName, parse_trace_name

DEEPEST = 4  # folders below the one that is searched: profiler_log, job, attempt
MOST_ENTRIES = 200_000  # files and folders that are looked at
_ATTEMPT = re.compile(r"attempt-(\d{1,9})", re.ASCII)


class TraceSet(NamedTuple):
    """The traces of the same steps, by rank, and the memory snapshots beside them."""

    folder: Path
    attempt: int
    first: int
    last: int
    files: dict[int, Path]
    memory: dict[int, Path]


def find_traces(folder: Path) -> list[TraceSet]:
    """All traces below a folder, in the order of attempts and steps."""
    found: dict[tuple[Path, int, int], list[tuple[TraceName, Path]]] = defaultdict(list)
    for file in _files(folder):
        if name := parse_trace_name(file.name):
            found[file.parent, name.first, name.last].append((name, file))
    sets = [_trace_set(*key, named) for key, named in found.items()]
    return sorted(
        (each for each in sets if each.files),
        key=lambda each: (str(each.folder.parent), each.attempt, each.first, each.last),
    )


def _trace_set(
    folder: Path, first: int, last: int, named: list[tuple[TraceName, Path]]
) -> TraceSet:
    number = _ATTEMPT.fullmatch(folder.name)
    files = {name.rank: file for name, file in sorted(named) if name.kind != MEMORY}
    memory = {name.rank: file for name, file in sorted(named) if name.kind == MEMORY}
    return TraceSet(folder, int(number[1]) if number else 0, first, last, files, memory)


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, not through links; as many as a profile can have."""
    left = MOST_ENTRIES
    base = len(folder.parts)
    for place, folders, names in os.walk(folder):
        left -= len(folders) + len(names)
        if left < 0:
            return
        if len(Path(place).parts) - base >= DEEPEST:
            folders.clear()
        yield from (Path(place, name) for name in names)
