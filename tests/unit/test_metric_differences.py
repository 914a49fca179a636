"""How two runs differ in what they measured. Oracle: rows written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gptctl.jobs.metric_differences import SHOWN, LastValue, metric_differences


def rows(losses: dict[int, float | None], speed: float | None = 100.0, **last: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "ips_total": speed, "speed": 1.0} for step, loss in losses.items()
    ]
    if last:
        found[-1] |= last
    return found


FALLING = {step: 5 - step / 100 for step in range(1, 101)}


def test_equal_runs_have_no_differences() -> None:
    found = metric_differences(rows(FALLING), rows(FALLING, speed=50.0), 1e-6)
    assert found.is_equal
    assert (found.differing, found.largest) == ([], None)
    assert (found.speeds, found.ratio) == ((100.0, 50.0), 0.5)


def test_the_first_difference_is_found_and_shown() -> None:
    """At step 37, and larger at step 90; below the tolerance nothing differs."""
    other = {**FALLING, 20: FALLING[20] + 5e-7, 37: FALLING[37] + 0.25, 90: FALLING[90] - 0.5}
    found = metric_differences(rows(FALLING), rows(other), 1e-6)
    assert [each.step for each in found.differing] == [37, 90]
    assert found.largest == pytest.approx(0.5)
    steps = [each.step for each in found.shown]
    assert (steps[0], steps[-1]) == (1, 100)
    assert 37 in steps
    assert len(steps) <= SHOWN + 1
    assert metric_differences(rows(FALLING), rows(other), 0.6).is_equal


def test_only_common_steps_are_compared() -> None:
    """One logs every third step and trains further: where both have a loss, it is equal, but one is longer."""
    found = metric_differences(rows(FALLING), rows({step: 5 - step / 100 for step in range(3, 121, 3)}), 1e-6)
    assert [each.step for each in found.losses] == list(range(3, 101, 3))
    assert not found.differing
    assert found.last_steps == (100, 120)
    assert not found.is_equal


def test_a_loss_that_is_not_finite_differs_from_a_number_only() -> None:
    broken: dict[int, float | None] = {**FALLING, 50: None}
    assert metric_differences(rows(broken), rows(broken), 1e-6).is_equal
    found = metric_differences(rows(FALLING), rows(broken), 1e-6)
    assert [(each.step, each.b, each.difference) for each in found.differing] == [(50, None, None)]
    assert found.largest is None


def test_the_last_evaluation_of_each_kind_counts() -> None:
    """Rows of evaluations alone have no loss, and are no steps to compare."""
    one = [*rows(FALLING, valid_loss=4.5), {"step": 101, "eval_ppl:wiki.txt": 30.0}]
    other = [*rows(FALLING, valid_loss=4.0, test_loss=3.0), {"step": 101, "eval_ppl:wiki.txt": 30.0}]
    one[9]["valid_loss"] = 4.0
    found = metric_differences(one, other, 1e-6)
    assert found.final == {
        "eval_ppl:wiki.txt": (LastValue(101, 30.0), LastValue(101, 30.0), True),
        "test_loss": (None, LastValue(100, 3.0), False),
        "valid_loss": (LastValue(100, 4.5), LastValue(100, 4.0), False),
    }
    assert len(found.losses) == 100
    assert not found.is_equal


def test_runs_without_rows() -> None:
    assert metric_differences([], [], 0.0).is_equal
    found = metric_differences(rows(FALLING), [], 0.0)
    assert not found.is_equal
    assert (found.shown, found.ratio, found.last_steps) == ([], None, (100, None))
