"""The table of ranks over steps. Oracle: the same ratios from all numbers at once."""

from __future__ import annotations

import random
from statistics import median

import pytest

from gptctl.jobs.rank_map import LEAST_COLUMNS, MOST_COLUMNS, MOST_GROUPS, RankMap, rank_map
from gptctl.jobs.rank_times import RankTimes


def times_of(steps: int, ranks: int, slow: dict[int, float] | None = None) -> list[RankTimes]:
    numbers = random.Random(3)
    rows = [[numbers.uniform(90, 110) * (slow or {}).get(rank, 1.0) for rank in range(ranks)] for _ in range(steps)]
    return [RankTimes(0, 10 * step, 100.0 + step, row) for step, row in enumerate(rows, 1)]


def mapped(times: list[RankTimes]) -> RankMap:
    found = rank_map(iter(times))
    assert found
    return found


@pytest.mark.parametrize("steps", [1, 7, MOST_COLUMNS, MOST_COLUMNS + 1, 2000])
def test_every_column_is_its_steps(steps: int) -> None:
    times = times_of(steps, 4)
    found = mapped(times)
    assert len(found.steps) <= MOST_COLUMNS
    assert (found.steps[0][0], found.steps[-1][1]) == (10, 10 * steps)
    for column, (first, last) in enumerate(found.steps):
        inside = [each for each in times if first <= each.step <= last]
        total = sum(median(each.own_ms) for each in inside)
        for rank in range(4):
            assert found.rows[rank][column] == pytest.approx(sum(each.own_ms[rank] for each in inside) / total)
    # Together they have every step once.
    assert sum(1 + (last - first) // 10 for first, last in found.steps) == steps


def test_the_slowest_ranks_come_first() -> None:
    times = times_of(300, 8, {5: 1.4, 2: 1.2})
    found = mapped(times)
    assert [each.rank for each in found.slowest[:2]] == [5, 2]
    usual = sum(median(each.own_ms) for each in times)
    assert found.slowest[0].ratio == pytest.approx(sum(each.own_ms[5] for each in times) / usual)


@pytest.mark.parametrize(("first", "then"), [(8, 2), (2, 8), (8, 16)])
def test_equal_ranks_of_an_elastic_job_are_equal(first: int, then: int) -> None:
    times = [RankTimes(0, step, float(step), [1000.0] * (first if step <= 700 else then)) for step in range(1, 1001)]
    found = mapped(times)
    assert {each.ratio for each in found.slowest} == {1.0}
    assert {ratio for row in found.rows for ratio in row if ratio is not None} == {1.0}


def test_a_rank_that_came_late_and_is_slow_is_named() -> None:
    times = [RankTimes(0, step, float(step), [1000.0] * 8) for step in range(1, 91)]
    times += [RankTimes(1, step, float(step), [*[1000.0] * 8, 3000.0, 1000.0]) for step in range(91, 101)]
    slowest = mapped(times).slowest[0]
    assert (slowest.rank, slowest.ratio) == (8, 3.0)


def test_many_ranks_share_rows_and_the_slowest_counts() -> None:
    ranks = 4 * MOST_GROUPS - 3
    found = mapped(times_of(3, ranks, {601: 3.0}))
    assert (found.ranks_per_row, len(found.rows)) == (4, MOST_GROUPS)
    assert found.rows[601 // 4][0] == pytest.approx(3.0, rel=0.15)
    assert found.slowest[0].rank == 601


def test_very_many_ranks_have_fewer_columns() -> None:
    found = mapped(times_of(3 * LEAST_COLUMNS, 70_000))
    assert LEAST_COLUMNS / 2 <= len(found.steps) <= LEAST_COLUMNS


def test_an_elastic_job_has_ranks_that_did_not_exist_at_first() -> None:
    found = mapped([*times_of(5, 2), *times_of(5, 4)])
    assert [row[0] for row in found.rows[2:]] == [None, None]
    assert all(row[-1] is not None for row in found.rows)


def test_without_times_there_is_no_table() -> None:
    assert rank_map(iter(())) is None
    assert mapped([RankTimes(0, 1, 1.0, [0.0, 0.0])]).rows == [[1.0], [1.0]]
