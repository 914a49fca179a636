"""Sets of moments, as sorted intervals that do not touch. Pure.

A trace has millions of intervals that overlap and contain each other. Only their union counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

COMPACT_AT = 1 << 16  # intervals that are collected before they are merged
Spans = list[tuple[float, float]]


class Union:
    """Collects intervals in any order; keeps their union."""

    def __init__(self) -> None:
        self._starts, self._ends = array("d"), array("d")
        self._limit = COMPACT_AT

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._ends.append(end)
        if len(self._starts) >= self._limit:
            self._compact()

    def _compact(self) -> None:
        merged = merge(zip(self._starts, self._ends))
        self._starts = array("d", (start for start, _ in merged))
        self._ends = array("d", (end for _, end in merged))
        # Twice what is left: merging again and again must not take quadratic time.
        self._limit = max(COMPACT_AT, 2 * len(merged))

    def spans(self) -> Spans:
        return merge(zip(self._starts, self._ends))


def merge(intervals: Iterable[tuple[float, float]]) -> Spans:
    """The union of intervals, in order."""
    merged: Spans = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def without(spans: Spans, removed: Spans) -> Spans:
    """What is in the first set and not in the second."""
    left: Spans = []
    at = 0
    for start, end in spans:
        # What ends before this interval ends before all later ones.
        while at < len(removed) and removed[at][1] <= start:
            at += 1
        number = at
        while number < len(removed) and removed[number][0] < end:
            if removed[number][0] > start:
                left.append((start, removed[number][0]))
            start = max(start, removed[number][1])
            number += 1
        if start < end:
            left.append((start, end))
    return left
