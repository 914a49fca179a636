"""Long curves with fewer points, without losing a spike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Point = tuple[int, float]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Keep the lowest and the highest point of each of many short ranges of steps.

    The first and the last point stay, too: a curve must begin and end where the run did.
    """
    if len(points) <= most:
        return list(points)
    first, last = points[0][0], points[-1][0]
    # By steps, not by points: a part that was logged more often must not get more room.
    width = max(1, -(-(last - first + 1) // max(1, (most - 2) // 2)))
    kept = {points[0], points[-1]}
    for _, group in groupby(points, key=lambda point: (point[0] - first) // width):
        part = list(group)
        kept |= {min(part, key=_value), max(part, key=_value)}
    return sorted(kept)


def _value(point: Point) -> float:
    return point[1]
