"""Rows of a training of any length, in bounded memory: beyond a limit, only some of them. Pure.

Rows are thinned by their steps, so that two long runs keep the same steps. What a summary must not
miss stays: where an attempt or a restart ends, and the extremes of every number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gptctl.logs.metric_rows import Row

MOST_ROWS = 100_000
MOST_VALUES = 1_500_000  # numbers in all rows
MOST_NAMES = 50  # whose extremes are kept
LARGEST_STRIDE = 1 << 40


def sample_of(
    rows: Iterable[Row], most: int = MOST_ROWS, most_values: int = MOST_VALUES
) -> RowSample:
    sample = RowSample(most, most_values)
    for row in rows:
        sample.add(row)
    return sample


class RowSample:
    def __init__(self, most: int, most_values: int, newest: int = 1) -> None:
        """`newest`: the last rows, which are always kept."""
        self._newest = deque[tuple[int, Row]](maxlen=newest)
        self._most, self._most_values = most, most_values
        self._kept: list[tuple[int, Row]] = []  # with their numbers
        self._extremes: dict[tuple[str, bool], tuple[float, int, Row]] = {}
        self._number, self._values, self._stride = 0, 0, 1
        self._ends: set[int] = set()  # the numbers of rows that a restart follows

    def add(self, row: Row) -> None:
        self._number += 1
        found, last = (self._number, row), self._newest[-1] if self._newest else None
        self._newest.append(found)
        # Before a restart: how far an attempt came decides what was trained again.
        if last and (row["step"] < last[1]["step"] or row["attempt"] != last[1]["attempt"]):
            self._ends.add(last[0])
            if not self._kept or self._kept[-1][0] != last[0]:
                self._keep(last)
        if self._is_wanted(row):
            self._keep(found)
        if self._stride > 1:
            self._note_extremes(found)

    def _is_wanted(self, row: Row) -> bool:
        # Evaluations, and where a run resumed, are few, and nothing else tells them.
        return "speed" not in row or int(row["step"]) % self._stride == 0

    def _keep(self, found: tuple[int, Row]) -> None:
        self._kept.append(found)
        self._values += len(found[1])
        if len(self._kept) > self._most or self._values > self._most_values:
            self._thin()

    def _thin(self) -> None:
        if self._stride == 1:
            for found in self._kept:
                self._note_extremes(found)
        half = len(self._kept) // 2 + 1  # of the steps 0 to 100, 51 are even
        while len(self._kept) > half and self._stride < LARGEST_STRIDE:
            self._stride *= 2
            self._kept = [
                found for found in self._kept if found[0] in self._ends or self._is_wanted(found[1])
            ]
        # A damaged file can have the same step in every row.
        self._kept = self._kept[-half:]
        self._ends &= {number for number, _ in self._kept}
        self._values = sum(len(row) for _, row in self._kept)

    def _note_extremes(self, found: tuple[int, Row]) -> None:
        number, row = found
        for name, value in row.items():
            if value is None or isinstance(value, str):
                continue
            for is_high, size in ((False, -value), (True, value)):
                known = self._extremes.get((name, is_high))
                has_room = len(self._extremes) < 2 * MOST_NAMES
                if (known and size > known[0]) or (known is None and has_room):
                    self._extremes[name, is_high] = (size, number, row)

    @property
    def left_out(self) -> str:
        """What is not in the sample; empty if it has all rows."""
        if self._stride == 1:
            return ""
        return f"{self._number:,} records: of most, one step in {self._stride} is used"

    def rows(self) -> list[Row]:
        found = dict(self._kept)
        found |= {number: row for _, number, row in self._extremes.values()}
        found |= dict(self._newest)
        return [found[number] for number in sorted(found)]
