"""The layout. Its oracle is `itertools.product` over the axes in the order dp, pp, sharding, mp, written out here."""

from __future__ import annotations

import itertools

import pytest

from trainer.layout import AXES, Coordinates, Layout, Machines, divisors, factorings, segments
from trainer.layout_rules import propose, solve_batch

LAYOUTS = [
    Layout(1, 1, 1, 1),
    Layout(8, 1, 1, 1),
    Layout(1, 1, 4, 2),
    Layout(2, 2, 1, 2),
    Layout(2, 2, 2, 2),
    Layout(3, 2, 5, 1),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_count_through_the_axes_with_mp_fastest(layout: Layout) -> None:
    cells = list(itertools.product(*(range(degree) for degree in layout)))
    assert layout.world == len(cells)
    assert [tuple(layout.coordinates(rank)) for rank in range(layout.world)] == cells
    assert [layout.rank(Coordinates(*cell)) for cell in cells] == list(range(layout.world))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_differs_along_its_axis_only(layout: Layout) -> None:
    cells = list(itertools.product(*(range(degree) for degree in layout)))
    for rank, cell in enumerate(cells):
        for position, axis in enumerate(AXES):
            same = [
                r
                for r, other in enumerate(cells)
                if other[:position] + other[position + 1 :] == cell[:position] + cell[position + 1 :]
            ]
            assert list(layout.group(axis, rank)) == same


def test_the_order_of_the_axes_written_out() -> None:
    """Outer to inner: dp, pp, sharding, mp. Literal ranks of a 2 × 2 × 2 × 2 layout."""
    layout = Layout(dp=2, pp=2, sharding=2, mp=2)
    assert layout.coordinates(1)._asdict() == {"dp": 0, "pp": 0, "sharding": 0, "mp": 1}
    assert layout.coordinates(2)._asdict() == {"dp": 0, "pp": 0, "sharding": 1, "mp": 0}
    assert layout.coordinates(4)._asdict() == {"dp": 0, "pp": 1, "sharding": 0, "mp": 0}
    assert layout.coordinates(11)._asdict() == {"dp": 1, "pp": 0, "sharding": 1, "mp": 1}
    groups = {axis: list(layout.group(axis, 11)) for axis in ("dp", "pp", "sharding", "mp")}
    assert groups == {"dp": [3, 11], "pp": [11, 15], "sharding": [9, 11], "mp": [10, 11]}
    assert [layout.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


def test_ranks_of_one_mp_pp_plane_read_the_same_data() -> None:
    layout = Layout(dp=2, pp=2, sharding=2, mp=2)
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.data_rank(rank) == at.dp * 2 + at.sharding
    assert {layout.data_rank(rank) for rank in range(layout.world)} == set(range(layout.data_ranks))


def test_pipeline_segments() -> None:
    """FleetX cuts 7 layers over 2 stages at 0, 3, 7."""
    assert segments(7, 2) == (range(3), range(3, 7))
    assert segments(96, 16) == tuple(range(6 * stage, 6 * stage + 6) for stage in range(16))
    for layers, parts in itertools.product(range(1, 40), range(1, 12)):
        cut = segments(layers, parts)
        assert [layer for part in cut for layer in part] == list(range(layers))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


BATCHES = [  # global, local, micro, replicas -> global, local, accumulation, or the rule that is violated
    ((32, None, 8, 4), (32, 8, 1)),
    ((None, 16, 2, 2), (32, 16, 8)),
    ((64, 8, 8, 8), (64, 8, 1)),
    ((None, None, 4, 8), (32, 4, 1)),
    ((64, None, 1, 4), (64, 16, 16)),
    ((30, None, 1, 4), "B001"),
    ((64, 8, 8, 4), "B001"),
    ((32, None, 8, 8), "B002"),
    ((None, 10, 4, 2), "B002"),
    ((30, 10, 4, 4), "B001 B002"),
]


@pytest.mark.parametrize(("given", "expected"), BATCHES)
def test_batch_sizes(given: tuple, expected: object) -> None:
    batch, found = solve_batch(*given)
    if isinstance(expected, str):
        assert [finding.code for finding in found] == expected.split()
        assert found[0].hint
    else:
        assert not found
        assert (batch.global_size, batch.local, batch.accumulate) == expected


def test_hints_of_batch_rules_work() -> None:
    """The sizes that a hint names are accepted when tried."""
    _, found = solve_batch(30, None, 2, 4)
    assert found[0].hint == "use 24 or 32"
    assert not solve_batch(24, None, 2, 4)[1]
    assert not solve_batch(32, None, 2, 4)[1]


def test_factorings_are_all_and_only_the_layouts_of_a_world() -> None:
    for world in (1, 7, 12, 16, 30):
        brute = {
            cell
            for cell in itertools.product(range(1, world + 1), repeat=4)
            if cell[0] * cell[1] * cell[2] * cell[3] == world
        }
        assert set(factorings(world)) == brute
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_proposals_stay_near_the_wish() -> None:
    wish = Layout(dp=1, pp=1, sharding=4, mp=2)
    nodes = Machines(2, 8)
    assert propose(wish, nodes, True, lambda _: True)[0] == Layout(dp=2, pp=1, sharding=4, mp=2)
    assert propose(wish, nodes, True, lambda _: True)[1:] == [Layout(1, 1, 8, 2), Layout(1, 2, 4, 2)]
    only_mp4 = propose(wish, nodes, True, lambda layout: layout.mp == 4)
    assert only_mp4[0] == Layout(dp=1, pp=1, sharding=4, mp=4)
    assert propose(wish, nodes, True, lambda _: False) == []


def test_giving_up_pp_costs_less_than_giving_up_mp() -> None:
    wish = Layout(dp=1, pp=2, sharding=1, mp=4)
    assert propose(wish, Machines(1, 4), True, lambda _: True)[:2] == [Layout(1, 1, 1, 4), Layout(1, 2, 1, 2)]


def test_proposals_keep_mp_inside_a_node() -> None:
    wish = Layout(dp=1, pp=1, sharding=1, mp=8)
    assert propose(wish, Machines(4, 4), True, lambda _: True)[0].mp == 4
