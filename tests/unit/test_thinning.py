"""Curves with fewer points. Oracle: the lowest and highest values of the whole curve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gptctl.thinning import thinned

CURVES = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9)), min_size=1, max_size=400, unique_by=lambda point: point[0]
).map(sorted)


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    points[7000] = (7000, -5.0)
    kept = thinned(points, 200)
    assert len(kept) <= 200
    assert {(4321, 99.0), (7000, -5.0), points[0], points[-1]} <= set(kept)


def test_a_part_that_was_logged_more_often_gets_no_more_room() -> None:
    """Steps 0 to 99 one by one, then every hundredth."""
    steps = [*range(100), *range(100, 10_001, 100)]
    kept = thinned([(step, float(step % 7)) for step in steps], 50)
    assert sum(step < 5000 for step, _ in kept) <= 30


@given(CURVES, st.integers(4, 100))
def test_what_is_kept(points: list[tuple[int, float]], most: int) -> None:
    kept = thinned(points, most)
    assert len(kept) <= max(most, 4)
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)
    if len(points) <= most:
        assert kept == points
