"""The one table of layouts that are trained in tests, and the model that suits them all."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from trainer.layout import Layout

# 4 layers, 4 heads: mp and pp up to 4. Micro-batches are as large as a layout allows.
MODEL: dict[str, object] = {"layers": 4, "heads": 4, "hidden": 32, "global_batch": 16}


class Case(NamedTuple):
    dp: int = 1
    pp: int = 1
    sharding: int = 1
    mp: int = 1
    stage: int = 2
    virtual: int = 1
    sequence: bool = False
    schedule: str = "1F1B"
    few: int = 0  # micro-batches, if they are fewer than the stages: then no schedule is written

    @property
    def layout(self) -> Layout:
        return Layout(self.dp, self.pp, self.sharding, self.mp)

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def name(self) -> str:
        degrees = [f"{axis}{degree}" for axis, degree in self.layout._asdict().items() if degree > 1]
        more = [f"stage{self.stage}"] * (self.sharding > 1) + ["interleaved"] * (self.virtual > 1)
        more += ["sequence"] * self.sequence + [self.schedule] * (self.schedule != "1F1B")
        more += [f"few{self.few}"] * (self.few > 0)
        return "-".join(degrees + more) or "one"

    @property
    def micro_batches(self) -> int:
        """With pp of them, an interleaved pipeline is done with a chunk before the next one has gradients."""
        return self.few or self.pp * self.virtual

    def keys(self, accumulate: int = 1, recompute: bool = False) -> dict[str, object]:
        """The config of a run; `accumulate` times as many micro-batches as the pipeline needs anyway."""
        return {
            **MODEL,
            "micro_batch": 16 // self.layout.data_ranks // self.micro_batches // accumulate,
            "Distributed.dp_degree": self.dp,
            "Distributed.pp_degree": self.pp,
            "Distributed.mp_degree": self.mp,
            "Distributed.sharding.sharding_degree": self.sharding,
            "Distributed.sharding.sharding_stage": self.stage,
            **({} if self.few else {"Distributed.pp_schedule": self.schedule}),
            "Model.virtual_pp_degree": self.virtual,
            "Model.sequence_parallel": self.sequence,
            "Model.use_recompute": recompute,
        }


ALONE = Case()
LAYOUTS = [
    ALONE,
    Case(dp=2),
    Case(dp=4),
    *(Case(sharding=degree, stage=stage) for degree in (2, 4) for stage in (1, 2, 3)),
    Case(mp=2),
    Case(mp=4),
    Case(mp=2, sequence=True),
    Case(pp=2),
    Case(pp=4),
    Case(pp=2, schedule="GPipe"),
    Case(pp=2, virtual=2),
    Case(dp=2, sharding=2),
    Case(dp=2, sharding=2, stage=3),
    Case(dp=2, mp=2),
    Case(dp=2, pp=2),
    *(Case(sharding=2, mp=2, stage=stage) for stage in (1, 2, 3)),
    *(Case(sharding=2, pp=2, stage=stage) for stage in (1, 2, 3)),
    Case(mp=2, pp=2),
    Case(dp=2, mp=2, pp=2),
    Case(sharding=2, mp=2, pp=2),
    Case(sharding=2, mp=2, pp=2, stage=3),
    Case(sharding=2, mp=2, pp=2, stage=3, sequence=True),
    Case(sharding=2, pp=2, virtual=2, stage=3),
    Case(dp=2, sharding=2, mp=2),
    Case(dp=2, sharding=2, pp=2),
    Case(sharding=4, mp=2),  # PaddleNLP's example on 8 cards
]
# Fewer micro-batches than stages; FleetX benchmarks dp 2, mp 2, pp 2 with one.
FEW = [Case(pp=2, few=1), Case(pp=4, few=2)]
MORE_FEW = [
    Case(dp=2, mp=2, pp=2, few=1),
    *(Case(sharding=2, pp=2, stage=stage, few=1) for stage in (1, 2, 3)),
]
LARGEST = Case(dp=2, sharding=2, mp=2, pp=2)  # 16 ranks


def cases(layouts: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in layouts]
