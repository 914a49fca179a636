"""Data parallel training. The oracle of every run is the same training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run, tiny

LOSS = 5e-6  # absolute, over 10 fp32 steps
NORM = 5e-6  # relative


def assert_same(here: list[float], there: list[float], tolerance: float) -> None:
    assert len(here) == len(there)
    assert max(abs(a - b) for a, b in zip(here, there)) <= tolerance


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    ended = run(tmp_path_factory.mktemp("alone"), *tiny())
    assert ended.ok, ended.text
    return ended.metrics(), ended.metrics("grad_norm")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_are_those_of_one_process(
    tmp_path: Path, alone: tuple[list[float], list[float]], world: int, accumulate: int
) -> None:
    """Oracle: one process that takes the whole batch at once."""
    if world * accumulate > 8:
        accumulate = 2
    ended = run(tmp_path, *tiny(micro_batch=8 // world // accumulate), world=world)
    assert ended.ok, ended.text
    assert len(ended.metrics()) == 10
    assert_same(ended.metrics(), alone[0], LOSS)
    relative = [norm / right for norm, right in zip(ended.metrics("grad_norm"), alone[1])]
    assert_same(relative, [1.0] * 10, NORM)
