"""What a run sends, against the table that is computed beforehand. Oracle: torch's own calls, counted.

Runs in fp32 are in `test_layouts.py`, which trains every layout anyway.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from tests.distributed.layouts import FEW, LARGEST, LAYOUTS, MORE_FEW, Case, cases
from tests.distributed.measured import Trained, train
from trainer.config.sections import RunConfig
from trainer.layout import Layout
from trainer.rank_plan import FORWARD, RankPlan, passes

SEVERAL = [case for case in [*LAYOUTS, *FEW] if case.world > 1]
HALF = [Case(dp=2), Case(sharding=2), Case(mp=2, sequence=True), Case(pp=2)]
SHORT = {"max_steps": 4, "eval_freq": 0, "test_iters": 0}


def assert_exact(trained: Trained) -> None:
    """Operation, group, dtype, bytes and number of calls, on every rank."""
    assert len(trained.sent) == trained.case.world
    for rank, sent in enumerate(trained.sent):
        assert sent.counted == sent.computed, f"rank {rank}"


def in_half(folder: Path, case: Case, level: str, accumulate: int = 1) -> Trained:
    amp = {"enable": True, "level": level, "dtype": "bfloat16"}
    keys = {f"Engine.mix_precision.{key}": value for key, value in amp.items()}
    return train(folder, case, accumulate, **SHORT, **keys)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", cases(HALF))
def test_hidden_states_travel_in_half(tmp_path: Path, case: Case, level: str) -> None:
    assert_exact(in_half(tmp_path, case, level))


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", cases([*SEVERAL, *MORE_FEW, LARGEST]))
def test_every_layout_in_half(tmp_path: Path, case: Case, level: str) -> None:
    assert_exact(in_half(tmp_path, case, level))


UNEVEN = [Case(pp=3), Case(sharding=3, stage=3), Case(sharding=3, stage=1, mp=2, sequence=True)]


@pytest.mark.long
@pytest.mark.parametrize("case", cases(UNEVEN))
def test_what_does_not_divide(tmp_path: Path, case: Case) -> None:
    """4 layers over 3 stages, rows of 32 over 3 ranks."""
    micro_batch = 12 // case.layout.data_ranks // case.micro_batches
    assert_exact(train(tmp_path, case, **SHORT, global_batch=12, micro_batch=micro_batch))


@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_the_order_of_an_interleaved_pipeline_is_that_of_torch(stage: int, virtual: int) -> None:
    """Oracle: the list that torch's own schedule makes."""
    layout, run = Layout(pp=4), RunConfig()
    run = replace(run, Model=replace(run.Model, num_layers=16, virtual_pp_degree=virtual))
    run = replace(run, Engine=replace(run.Engine, accumulate_steps=16))
    schedule = SimpleNamespace(
        pp_group_size=4, n_local_stages=virtual, _n_microbatches=16, number_of_rounds=4, microbatches_per_round=4
    )
    actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, stage)
    expected = [(action.stage_index // 4, action.computation_type.name == "FORWARD") for action in actions if action]
    assert [(chunk, when == FORWARD) for chunk, when in passes(RankPlan(run, layout, stage))] == expected
