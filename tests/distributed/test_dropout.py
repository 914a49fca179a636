"""Which elements are dropped. Oracles: one process, the same run without recomputation, and the masks themselves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.layouts import ALONE, Case, cases
from tests.distributed.measured import train
from tests.ranks import Ended, Ranks, tiny
from trainer import model
from trainer.__main__ import main

STEPS = 4
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "max_steps": STEPS, "eval_freq": 0, "test_iters": 0}


def losses(folder: Path, case: Case, accumulate: int = 1, recompute: bool = False, **more: object) -> list[float]:
    return train(folder, case, accumulate, recompute, **{**DROPOUT, **more}).ended.metrics()


@pytest.mark.parametrize("case", cases([Case(sharding=2, stage=3), Case(pp=2, virtual=2), Case(dp=2, pp=2)]))
def test_without_mp_no_layout_changes_what_is_dropped(tmp_path: Path, case: Case) -> None:
    """The same micro-batches on one process drop the same, so the losses are the same."""
    here = losses(tmp_path / "here", case)
    micro_batch = case.keys()["micro_batch"]
    alone = losses(tmp_path / "alone", ALONE, micro_batch=micro_batch)
    assert max(abs(a - b) for a, b in zip(here, alone)) <= 5e-6


def test_dropout_drops_something(tmp_path: Path) -> None:
    """So the comparisons here notice a mistake."""
    dropping, without = losses(tmp_path / "on", ALONE), losses(tmp_path / "off", ALONE, dropout=0, attention_dropout=0)
    assert max(abs(a - b) for a, b in zip(without, dropping)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("case", cases([Case(mp=2, sequence=True), Case(sharding=2, stage=3)]))
def test_recomputation_drops_the_same_again_elsewhere(tmp_path: Path, case: Case) -> None:
    test_recomputation_drops_the_same_again(tmp_path, case)


@pytest.mark.parametrize("case", cases([Case(mp=2)]))
def test_recomputation_drops_the_same_again(tmp_path: Path, case: Case) -> None:
    kept = losses(tmp_path / "kept", case, 2)
    granularity = "core_attn" if case.mp > 1 else "full"  # where each rank drops by a stream of its own
    again = losses(tmp_path / "again", case, 2, True, **{"Model.recompute_granularity": granularity})
    assert max(abs(a - b) for a, b in zip(kept, again)) <= 1e-6


def test_layers_recomputed_together_drop_the_same_again(tmp_path: Path) -> None:
    """Where a layer's stream is begun anew inside of what is recomputed, in the backward pass of an earlier micro-batch."""
    kept = losses(tmp_path / "kept", Case(pp=2), 2)
    again = losses(tmp_path / "again", Case(pp=2), 2, True, **{"Distributed.pp_recompute_interval": 2})
    assert max(abs(a - b) for a, b in zip(kept, again)) <= 1e-6


def noting_main(arguments: Sequence[str]) -> int:
    """The trainer, which notes what is dropped of hidden states, and the seeds of attention."""
    dropped, attention = model._dropped, torch.nn.functional.scaled_dot_product_attention
    noted: dict[str, list[object]] = {"hidden": [], "attention": []}

    def noting_dropped(x: Tensor, probability: float, training: bool) -> Tensor:
        y = dropped(x, probability, training)
        if training:
            noted["hidden"].append(hashlib.sha256((y == 0).numpy().tobytes()).hexdigest())
        return y

    def noting_attention(*args: Tensor, **kwargs: object) -> Tensor:
        if kwargs["dropout_p"]:
            noted["attention"].append(torch.default_generator.initial_seed())
        return attention(*args, **kwargs)

    model._dropped = noting_dropped
    model.F.scaled_dot_product_attention = noting_attention  # type: ignore[assignment]
    code = main(arguments)
    Path(f"noted.{os.environ['RANK']}").write_text(json.dumps(noted))
    return code


def masks(folder: Path, case: Case) -> list[dict[str, list[object]]]:
    folder.mkdir(exist_ok=True)
    ended: Ended = Ranks(tiny(**case.keys(), **DROPOUT), case.world, folder, {}, noting_main).wait()
    assert ended.ok, ended.text
    return [json.loads((folder / f"noted.{rank}").read_text()) for rank in range(case.world)]


@pytest.mark.parametrize("sequence", [False, True])
def test_an_mp_group_drops_alike_where_it_holds_the_same(tmp_path: Path, sequence: bool) -> None:
    """Hidden states are the same on both ranks, or other parts of the sequence; heads are always others."""
    one, other = masks(tmp_path, Case(mp=2, sequence=sequence))
    pairs = list(zip(one["hidden"], other["hidden"]))
    assert len(pairs) == STEPS * (1 + 2 * 4)  # updates · (embedding, and two per layer)
    assert len(set(one["hidden"])) == len(pairs)  # and no two layers or updates drop alike
    assert all((a != b) == sequence for a, b in pairs)
    assert not set(one["attention"]) & set(other["attention"])
    assert len(set(one["attention"])) == STEPS * 4
