"""How long each rank needed for its steps, from the first to the last, in bounded memory.

Pure: the times of a run in the order of writing go in, a small table comes out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from gptctl.jobs.rank_times import RankTimes

MOST_COLUMNS = 480  # of logged steps
MOST_SUMS = 1_000_000  # ranks times columns that are kept: 32 MB
LEAST_COLUMNS = 16
MOST_GROUPS = 256  # rows of the table; beyond that each of them stands for several ranks
NUM_SLOWEST = 5
LEAST_TIME = 1e-6  # milliseconds: nothing is compared with less


class RankRatio(NamedTuple):
    rank: int
    ratio: float  # its own time against that of the median rank, over all logged steps


class RankMap(NamedTuple):
    """Rows of ratios: a rank's own time against the median rank's; the slowest of a group."""

    num_ranks: int
    ranks_per_row: int
    steps: list[tuple[int, int]]  # of each column: the first and the last
    rows: list[list[float | None]]  # None: the rank did not exist then
    slowest: list[RankRatio]  # the slowest one first


class _Bin:
    """Several logged steps, one after the other."""

    def __init__(self, times: RankTimes) -> None:
        self.first = self.last = times.step
        self.lines = 1
        self.median = times.median
        self.own = times.own_ms

    def add(self, other: _Bin) -> None:
        self.last = other.last
        self.lines += other.lines
        self.median += other.median
        self.own = [*map(operator.add, self.own, other.own)]

    def ratios(self, ranks_per_row: int) -> list[float]:
        starts = range(0, len(self.own), ranks_per_row)
        slowest = [max(self.own[start : start + ranks_per_row]) for start in starts]
        return [own / self.median if self.median > LEAST_TIME else 1.0 for own in slowest]


def rank_map(times: Iterable[RankTimes]) -> RankMap | None:
    """Return the table of a run; None if no rank recorded its times."""
    bins, size = list[_Bin](), 1
    for each in times:
        new = _Bin(each)
        if bins and bins[-1].lines < size and len(bins[-1].own) == len(each.own_ms):
            bins[-1].add(new)
        else:
            bins.append(new)
        # Half as many columns, each of twice as many steps: memory stays the same.
        if len(bins) > _most_columns(len(each.own_ms)):
            bins, size = _in_pairs(bins), 2 * size
    if not bins:
        return None
    num_ranks = max(len(each.own) for each in bins)
    per_row = -(-num_ranks // MOST_GROUPS)
    columns = [each.ratios(per_row) for each in bins]
    rows = [
        [column[row] if row < len(column) else None for column in columns]
        for row in range(-(-num_ranks // per_row))
    ]
    steps = [(each.first, each.last) for each in bins]
    return RankMap(num_ranks, per_row, steps, rows, _slowest(bins))


def _most_columns(ranks: int) -> int:
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, MOST_SUMS // ranks))


def _in_pairs(bins: list[_Bin]) -> list[_Bin]:
    """Join neighbours, but not of steps with other numbers of ranks: their sums would not match."""
    joined: list[_Bin] = []
    is_free = False  # whether the last one is still alone
    for each in bins:
        if is_free and len(joined[-1].own) == len(each.own):
            joined[-1].add(each)
            is_free = False
        else:
            joined.append(each)
            is_free = True
    # Only a damaged file has so many changes.
    return joined if len(joined) < len(bins) else joined[-len(bins) // 2 :]


def _slowest(bins: list[_Bin]) -> list[RankRatio]:
    """Each rank over the steps that it took part in: an elastic job had more of them at times."""
    own: list[float] = []
    medians: list[float] = []
    for each in bins:
        missing = [0.0] * (len(each.own) - len(own))
        own, medians = [*own, *missing], [*medians, *missing]
        for rank, value in enumerate(each.own):
            own[rank] += value
            medians[rank] += each.median
    if len(own) < 2:
        return []
    ratios = [value / usual if usual > LEAST_TIME else 1.0 for value, usual in zip(own, medians)]
    ranks = sorted(range(len(own)), key=ratios.__getitem__, reverse=True)
    return [RankRatio(rank, ratios[rank]) for rank in ranks[:NUM_SLOWEST]]
