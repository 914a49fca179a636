"""In which order jobs or sweeps were submitted: a list in their folder, to which each is appended.

Not by time: somebody may set the clock between two submissions, and then the latest job would not
be the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gptctl.engine.file_reading import append_line, read_text

ORDER = "order"


def append_to_order(folder: Path, name: str) -> None:
    """Put a name at the end of the list."""
    # Without the list, times decide: no reason to refuse a job.
    with suppress(OSError):
        append_line(folder / ORDER, name)


def in_order(folder: Path, names: Collection[str], time_of: Callable[[str], float]) -> list[str]:
    """Sort names by their times, then let those in the list change places among each other.

    Names of older versions are not in the list, and keep their places.
    """
    lines = read_text(folder / ORDER).split("\n")
    # An id that was removed may be used again: its last line counts.
    places = {line: number for number, line in enumerate(lines)}
    listed = sorted((name for name in names if name in places), key=places.__getitem__)
    # Mostly these are all, and then nobody needs the times.
    if len(listed) == len(names):
        return listed
    by_time = sorted((time_of(name), name) for name in names)
    following = iter(listed)
    return [next(following) if name in places else name for _, name in by_time]
