"""Every layout trains the same model. The oracle of each is one process that takes the whole batch at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Train
from tests.distributed.layouts import ALONE, FEW, LARGEST, LAYOUTS, MORE_FEW, Case, cases
from tests.distributed.measured import EVALUATION, train
from tests.distributed.test_bytes import assert_as_estimated
from tests.distributed.test_collectives import assert_exact
from tests.ranks import Ended, Ranks, run, tiny
from trainer.__main__ import main
from trainer.logit_chunks import CHUNK_LOGITS
from trainer.parallel import Parallel

LOSS = 5e-6  # absolute, over 10 fp32 steps
NORM = 5e-6  # relative


@pytest.fixture(scope="module")
def alone(trained: Train) -> Ended:
    return trained(ALONE).ended


def difference(here: list[float], there: list[float], relative: bool = False) -> float:
    assert len(here) == len(there) > 0
    return max(abs(a / b - 1) if relative else abs(a - b) for a, b in zip(here, there))


def assert_same(ended: Ended, alone: Ended) -> None:
    assert len(ended.metrics()) == 10
    assert difference(ended.metrics(), alone.metrics()) <= LOSS
    assert difference(ended.metrics("grad_norm"), alone.metrics("grad_norm"), relative=True) <= NORM
    for name in ("valid_loss", "test_loss"):
        assert difference(ended.metrics(name), alone.metrics(name)) <= LOSS


@pytest.mark.parametrize("case", cases(LAYOUTS))
def test_losses_are_those_of_one_process(trained: Train, alone: Ended, case: Case) -> None:
    """Ten updates, two evaluations and a test run; gradient norms too."""
    assert_same(trained(case).ended, alone)


COVERING = [
    Case(dp=2),
    *(Case(sharding=2, stage=stage) for stage in (1, 2, 3)),
    Case(mp=2),
    Case(mp=2, sequence=True),
    Case(pp=2),
    Case(pp=2, virtual=2),
]


@pytest.mark.parametrize("case", cases(COVERING))
def test_with_recompute_and_accumulation(trained: Train, alone: Ended, case: Case) -> None:
    assert_same(trained(case, accumulate=2, recompute=True).ended, alone)


SEVERAL = [case for case in [*LAYOUTS, *FEW] if case.world > 1]


@pytest.mark.parametrize("case", cases(SEVERAL))
def test_they_send_what_the_table_says(trained: Train, case: Case) -> None:
    """Operation, group, dtype, bytes and number of calls, as `gptctl topo --collectives` has them.

    So all ranks sum one summary per step.
    """
    assert_exact(trained(case))


@pytest.mark.parametrize("case", cases(COVERING))
def test_so_they_do_with_recompute_and_accumulation(trained: Train, case: Case) -> None:
    assert_exact(trained(case, accumulate=2, recompute=True))


@pytest.mark.long
@pytest.mark.parametrize(("accumulate", "recompute"), [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize("case", cases(LAYOUTS))
def test_all_with_recompute_and_accumulation(
    trained: Train, alone: Ended, case: Case, accumulate: int, recompute: bool
) -> None:
    """And their bytes are as estimated."""
    this = trained(case, accumulate=accumulate, recompute=recompute)
    assert_same(this.ended, alone)
    assert_as_estimated(this)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_sixteen_ranks(tmp_path: Path, alone: Ended, recompute: bool) -> None:
    this = train(tmp_path, LARGEST, recompute=recompute)
    assert_same(this.ended, alone)
    assert_as_estimated(this)


@pytest.mark.parametrize("case", cases([Case(mp=2), Case(pp=2)]))
def test_the_loss_of_a_large_vocabulary_is_the_same(
    tmp_path: Path, alone: Ended, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in chunks, here of 24 tokens at a time; the oracle makes all logits at once."""
    monkeypatch.setattr("trainer.loss.LARGE_VOCAB", 1)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 24 * 128 // case.mp)
    assert_same(train(tmp_path, case).ended, alone)


LONG = [pytest.param(case, id=case.name, marks=pytest.mark.long) for case in MORE_FEW]


@pytest.mark.parametrize("case", [*cases(FEW), *LONG])
def test_fewer_micro_batches_than_stages(trained: Train, alone: Ended, case: Case) -> None:
    """GPipe, chosen by gptctl; the log warns. The bytes are as estimated too."""
    this = trained(case)
    assert_same(this.ended, alone)
    assert_as_estimated(this)
    assert "warning: L012 Distributed.pp_degree" in this.ended.out[0]


UNEVEN = [Case(pp=3), Case(sharding=3, stage=3)]


@pytest.mark.parametrize("case", cases(UNEVEN))
def test_what_does_not_divide(tmp_path: Path, case: Case) -> None:
    """4 layers over 3 stages, rows of 32 over 3 ranks: no layer and no row is dropped."""
    whole = train(tmp_path / "alone", ALONE, global_batch=12, micro_batch=12).ended
    ended = train(tmp_path / "split", case, global_batch=12, micro_batch=4).ended
    assert_same(ended, whole)


@pytest.mark.parametrize("interval", [1, 2])
def test_layers_recomputed_together(tmp_path: Path, alone: Ended, interval: int) -> None:
    more = {"Distributed.pp_recompute_interval": interval}
    assert_same(train(tmp_path, Case(pp=2), recompute=True, **more).ended, alone)


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_runs_without_a_gpu_and_says_that_it_gains_nothing(tmp_path: Path, alone: Ended, stage: int) -> None:
    ended = train(tmp_path, Case(sharding=2, stage=stage), **{"Distributed.sharding.sharding_offload": True}).ended
    assert_same(ended, alone)
    assert "N005 Distributed.sharding.sharding_offload" in ended.out[0]


def test_overlap_changes_nothing_but_the_time(tmp_path: Path, alone: Ended) -> None:
    more = {"Distributed.sharding.broadcast_overlap": True, "Distributed.sharding.reduce_overlap": True}
    ended = train(tmp_path, Case(sharding=2), logging_freq=2, **more).ended
    assert difference(ended.metrics(), alone.metrics()[1::2]) <= LOSS
    assert "N004 Distributed.sharding.reduce_overlap" in ended.out[0]


HALF = {"Engine.mix_precision.enable": True, "Engine.mix_precision.scale_loss": 1024}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(Case(sharding=2, stage=3), "bfloat16"), (Case(mp=2), "float16"), (Case(pp=2, virtual=2), "bfloat16")],
)
def test_mixed_precision_stays_near_fp32(tmp_path: Path, alone: Ended, case: Case, dtype: str) -> None:
    tolerance = {"bfloat16": 2e-3, "float16": 5e-4}[dtype]
    ended = train(tmp_path, case, **{**HALF, "Engine.mix_precision.dtype": dtype}).ended
    assert 0 < difference(ended.metrics(), alone.metrics()) <= tolerance


@pytest.mark.long
def test_an_overflow_on_one_stage_skips_the_update_on_all_ranks(tmp_path: Path) -> None:
    """A loss scale of 2³² overflows float16 somewhere; every rank has to see it, or losses go apart."""
    amp = {"Engine.mix_precision.enable": True, "Engine.mix_precision.scale_loss": 2.0**32, "max_steps": 25}
    whole = run(tmp_path / "alone", *tiny(**ALONE.keys(), **amp))
    for case in (Case(pp=2), Case(sharding=2, stage=3)):
        ended = run(tmp_path / case.name, *tiny(**case.keys(), **amp), world=2)
        assert ended.ok, ended.text
        skipped = ended.metrics("grad_norm").count(None)
        assert abs(skipped - whole.metrics("grad_norm").count(None)) <= 1
        assert ended.metrics()[-1] < ended.metrics()[0] - 0.1


def without_tied_sum(arguments: Any) -> int:
    Parallel._add_up = lambda *_: None  # type: ignore[method-assign]
    return main(arguments)


def test_the_comparison_notices_a_mistake(tmp_path: Path, alone: Ended) -> None:
    """The two ends of a pipeline with an embedding each: far outside of the tolerance. Likewise partial sums of norms."""
    for case in (Case(pp=2), Case(mp=2, sequence=True)):
        folder = tmp_path / case.name
        folder.mkdir()
        ended = Ranks(tiny(**case.keys(), **EVALUATION), 2, folder, {}, without_tied_sum).wait()
        assert ended.ok, ended.text
        assert difference(ended.metrics(), alone.metrics()) > 100 * LOSS
