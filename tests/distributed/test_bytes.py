"""What a rank holds and sends. Oracles: the tensors themselves, the estimate made beforehand, and arithmetic."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import Train
from tests.distributed.layouts import ALONE, LAYOUTS, Case, cases
from tests.distributed.measured import Trained

LAYERS = 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_shrinks_what_it_promises(trained: Train, stage: int) -> None:
    """All sizes of the model divide by 2, so the shares are exact. Gradients after the first of two micro-batches."""
    (whole,) = trained(ALONE, accumulate=2).held
    for held in trained(Case(sharding=2, stage=stage), accumulate=2, recompute=True).held:
        assert held.optimizer * 2 == whole.optimizer
        assert held.gradients[0] * (1 if stage == 1 else 2) == whole.gradients[0]
        gathered = whole.parameters if stage < 3 else 0
        assert (held.parameters - gathered) * 2 == whole.parameters


@pytest.mark.parametrize("degree", [2, 4])
def test_optimizer_state_shrinks_with_the_degree(trained: Train, degree: int) -> None:
    (whole,) = trained(ALONE, accumulate=2).held
    assert {held.optimizer * degree for held in trained(Case(sharding=degree)).held} == {whole.optimizer}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_keeps_whole_gradients_through_the_accumulation(trained: Train, stage: int) -> None:
    """The gradients of a stage after its first micro-batch are as large as without sharding, and the log says so."""
    plain, sharded = trained(Case(pp=2)), trained(Case(pp=2, sharding=2, stage=stage))
    for rank, held in enumerate(sharded.held):
        assert held.gradients[0] == plain.held[rank // 2].gradients[0]
        assert held.optimizer * 2 == plain.held[rank // 2].optimizer
    assert "with pp, ranks hold full gradients" in sharded.ended.out[0]


def assert_as_estimated(trained: Trained) -> None:
    """On the rank of each stage that holds most, to the byte."""
    stages = [trained.case.layout.coordinates(rank).pp for rank in range(trained.case.world)]
    for stage in set(stages):
        held = [each for number, each in zip(stages, trained.held) if number == stage]
        counted = [
            max(each.parameters for each in held),
            max(max(each.gradients) for each in held),
            max(each.optimizer for each in held),
        ]
        assert counted == held[0].estimated


@pytest.mark.parametrize("case", cases(LAYOUTS))
def test_the_estimate_is_exact(trained: Train, case: Case) -> None:
    assert_as_estimated(trained(case))


@pytest.mark.parametrize("case", cases([Case(sharding=2, stage=stage) for stage in (1, 2, 3)]))
def test_the_estimate_is_exact_with_accumulation(trained: Train, case: Case) -> None:
    assert_as_estimated(trained(case, accumulate=2, recompute=True))


NORM = 1  # every update ends with one sum over all ranks: the norm of the gradient, with the loss
GROUPS = LAYERS + 1  # that FSDP gathers and reduces together: the layers, and what is left


def collectives(trained: Trained) -> dict[str, int]:
    """Of the first rank. gloo makes a reduce-scatter of an all-reduce."""
    return trained.held[0].collectives


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_of_sharding(trained: Train, stage: int, accumulate: int) -> None:
    """Stages 1 and 2 gather once per update, stage 3 twice per micro-batch; 2 and 3 reduce with every micro-batch."""
    found = collectives(trained(Case(sharding=2, stage=stage), accumulate, recompute=accumulate > 1))
    gathers = GROUPS if stage < 3 else 2 * GROUPS * accumulate
    reduces = GROUPS if stage == 1 else GROUPS * accumulate
    assert found == {"all_gather": gathers, "all_to_all": reduces, "all_reduce": NORM}


def test_collectives_of_hybrid_sharding(trained: Train) -> None:
    """Every group is reduced over sharding, then over dp."""
    found = collectives(trained(Case(dp=2, sharding=2)))
    assert found == {"all_gather": GROUPS, "all_to_all": GROUPS, "all_reduce": GROUPS + NORM}


@pytest.mark.parametrize(("accumulate", "recompute"), [(1, False), (2, True)])
def test_collectives_of_tensor_parallel(trained: Train, accumulate: int, recompute: bool) -> None:
    """Per layer 2 in each pass; the embedding, the head, and 2 small ones of the loss. Recomputation stops before the
    last sum of a layer, whose result nobody needs again."""
    per_micro_batch = 4 * LAYERS + 4 + (LAYERS if recompute else 0)
    found = collectives(trained(Case(mp=2), accumulate, recompute=recompute))
    assert found == {"all_reduce": accumulate * per_micro_batch + NORM}


def test_collectives_of_sequence_parallel(trained: Train) -> None:
    """Every all-reduce is a reduce-scatter and an all-gather; shared parameters are summed once per update. Layers keep
    only a part of the input of two products, and gather it again."""
    pairs = 4 * LAYERS + 2
    found = collectives(trained(Case(mp=2, sequence=True)))
    assert found == {"all_gather": pairs + 2 * LAYERS, "all_to_all": pairs, "all_reduce": 2 + 1 + NORM}


@pytest.mark.parametrize("case", cases([Case(pp=2), Case(pp=4), Case(pp=2, schedule="GPipe"), Case(pp=2, virtual=2)]))
def test_messages_of_a_pipeline(trained: Train, case: Case) -> None:
    """Every boundary between chunks is crossed by every micro-batch, forward and back; the ends sum their embedding."""
    held = trained(case).held
    boundaries, micro_batches = case.pp * case.virtual - 1, case.micro_batches
    for kind in ("send", "recv"):
        assert sum(each.collectives[kind] for each in held) == 2 * boundaries * micro_batches
    assert [each.collectives["all_reduce"] - NORM for each in held] == [1, *[0] * (case.pp - 2), 1]


def test_data_parallel_needs_one_bucket(trained: Train) -> None:
    assert collectives(trained(Case(dp=2))) == {"all_reduce": 1 + NORM}
