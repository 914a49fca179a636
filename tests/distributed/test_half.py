"""Half precision in every layout. The oracle is the same update in fp32, in one process with the whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.layouts import ALONE, Case, cases
from tests.ranks import Ended, run, tiny

NORM = 0.01  # relative, at any accumulation
LOSS = 5e-3  # relative

LAYOUTS = [
    ALONE,
    Case(dp=2),
    *(Case(sharding=2, stage=stage) for stage in (1, 2, 3)),
    Case(mp=2),
    Case(pp=2),
    Case(dp=2, sharding=2),
]
MODEL = {"layers": 2, "hidden": 16, "heads": 2, "seq_len": 8, "max_steps": 2}


def update(folder: Path, case: Case, accumulate: int, **keys: object) -> Ended:
    """Two updates of micro-batches with one sample each."""
    sizes = {"global_batch": accumulate * case.layout.data_ranks, "micro_batch": 1}
    ended = run(folder, *tiny(**{**case.keys(), **MODEL, **sizes, **keys}), world=case.world, seconds=600)
    assert ended.ok, ended.text
    return ended


def half(dtype: str, level: str) -> dict[str, object]:
    values = {"enable": True, "dtype": dtype, "level": level, "scale_loss": 1024}
    return {f"Engine.mix_precision.{key}": value for key, value in values.items()}


Oracle = Callable[[int], Ended]


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    @cache
    def once(global_batch: int) -> Ended:
        return update(tmp_path_factory.mktemp("fp32"), ALONE, global_batch, micro_batch=global_batch)

    return once


def difference(here: list[float], there: list[float]) -> float:
    assert len(here) == len(there) == 2
    assert all(map(math.isfinite, here))
    return max(abs(a / b - 1) for a, b in zip(here, there))


def assert_near(ended: Ended, right: Ended) -> None:
    assert difference(ended.metrics("grad_norm"), right.metrics("grad_norm")) <= NORM
    assert 0 < difference(ended.metrics(), right.metrics()) <= LOSS


@pytest.mark.parametrize("case", cases(LAYOUTS))
def test_an_update_is_near_that_of_fp32(tmp_path: Path, fp32: Oracle, case: Case) -> None:
    """bfloat16 and O2, where most is rounded."""
    ended = update(tmp_path, case, 8, **half("bfloat16", "O2"))
    assert_near(ended, fp32(8 * case.layout.data_ranks))


@pytest.mark.long
@pytest.mark.parametrize("case", cases(LAYOUTS))
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("accumulate", [1, 8, 64])
def test_all_are_near_fp32(tmp_path: Path, fp32: Oracle, case: Case, level: str, dtype: str, accumulate: int) -> None:
    number = max(accumulate, case.pp)
    ended = update(tmp_path, case, number, **half(dtype, level))
    assert_near(ended, fp32(number * case.layout.data_ranks))


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", cases(LAYOUTS))
def test_1536_micro_batches_are_added_up(tmp_path: Path, fp32: Oracle, case: Case, level: str) -> None:
    """As in the 175B template. Added up in bfloat16, the norm was 22 % too small, and 44 % with dp2 and sharding2."""
    ended = update(tmp_path, case, 1536, **half("bfloat16", level))
    assert_near(ended, fp32(1536 * case.layout.data_ranks))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "level"), [(ALONE, None), (ALONE, "O2"), (Case(dp=2), "O1"), (Case(sharding=2, stage=2), "O2")]
)
def test_a_checkpoint_has_no_precision(tmp_path: Path, case: Case, level: str | None) -> None:
    """Saved by O2 with sharding, continued by any other. Oracle: fp32 that was never interrupted."""
    pure = half("bfloat16", "O2")
    whole = run(tmp_path / "whole", *tiny(**ALONE.keys(), max_steps=8))
    saving = Case(sharding=2, stage=3)
    saved = run(tmp_path / "saved", *tiny(**saving.keys(), **pure, max_steps=4), world=2)
    assert saved.ok, saved.text
    keys = half("bfloat16", level) if level else {}
    checkpoint = tmp_path / "saved" / "output" / "step_4"
    ended = run(tmp_path / "next", *tiny(**case.keys(), **keys, max_steps=8, ckpt_dir=checkpoint), world=case.world)
    assert ended.ok, ended.text
    assert max(abs(a - b) for a, b in zip(ended.metrics(), whole.metrics()[4:], strict=True)) <= LOSS
