"""The memory estimate against counted bytes. Oracle: rehearsals, which `test_rehearse.py` compares with torch's allocator."""

from __future__ import annotations

import pytest

from tests.distributed.layouts import ALONE, FEW, LARGEST, LAYOUTS, Case, cases
from tests.distributed.rehearsed import LEVELS, resolved
from trainer.memory import peak_memory
from trainer.rehearse import rehearse

SEVERAL = [ALONE, Case(sharding=2, stage=3), Case(mp=2, sequence=True), Case(sharding=2, pp=2, stage=3)]
RECOMPUTED = {"hidden": 128, "heads": 8, "seq_len": 64, "Model.use_recompute": True}


def assert_close(case: Case, level: str, tolerance: float = 0.02, **keys: object) -> None:
    """On the first and the last rank."""
    known = resolved(case, **{**LEVELS[level], **keys})
    for rank in {0, case.world - 1}:
        counted = rehearse(known.run, known.layout, rank).peak
        estimated = peak_memory(known.run, known.layout, rank)
        assert estimated.total == pytest.approx(counted.total, rel=tolerance), (rank, estimated, counted)


@pytest.mark.parametrize("case", cases(SEVERAL))
def test_the_peak_is_within_two_percent(case: Case) -> None:
    assert_close(case, "O2")


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases([*LAYOUTS, *FEW, LARGEST]))
def test_every_layout(case: Case, level: str) -> None:
    assert_close(case, level)


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases([each for each in [*LAYOUTS, *FEW] if each.world <= 2]))
def test_recomputation(case: Case, level: str) -> None:
    assert_close(case, level, **RECOMPUTED)


@pytest.mark.parametrize("exempt", ["[]", "[0,1]"])
def test_layers_that_recompute_their_attention(exempt: str) -> None:
    """Exempt layers keep it: 7 % of this peak."""
    assert_close(
        ALONE, "O2", **RECOMPUTED, **{"Model.recompute_granularity": "full_attn", "Model.no_recompute_layers": exempt}
    )
