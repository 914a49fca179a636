"""The table of collectives. Oracles: golden files, the formulas of Megatron-LM and ZeRO written out.

`GOLDEN=update pytest tests/unit/test_collective_rows.py` writes the golden files again. Real runs are compared in
`tests/distributed/test_collectives.py`.
"""

from __future__ import annotations

import json
import os
from itertools import product

import pytest

from gptctl.spec.collective_rows import reasons, size_text, totals
from tests.conftest import ROOT
from trainer.collectives import Row, collectives
from trainer.config import Override, load
from trainer.config.resolve import Resolved
from trainer.layout import DEGREE_KEYS, Layout, Machines, factorings

GOLDEN = ROOT / "tests" / "golden" / "collectives"
SMALL = {
    "Model.name": "GPT",
    "Model.num_layers": 8,
    "Model.hidden_size": 64,
    "Model.num_attention_heads": 16,
    "Model.vocab_size": 1000,
    "Model.hidden_dropout_prob": 0,
    "Model.max_position_embeddings": 32,
    "Data.Train.dataset.max_seq_len": 32,
    "Data.Train.dataset.input_dir": "data",
    "Global.local_batch_size": 32,
    "Global.micro_batch_size": 2,
}
STAGE, SEQUENCE, VIRTUAL = "Distributed.sharding.sharding_stage", "Model.sequence_parallel", "Model.virtual_pp_degree"
M, S, B, H, L, V = 16, 32, 2, 64, 8, 1024  # as above; the vocabulary is padded
LAYER = 12 * H * H + 13 * H
P = V * H + S * H + L * LAYER + 2 * H


def resolved(layout: Layout, half: bool = False, **keys: object) -> Resolved:
    degrees = {DEGREE_KEYS[axis]: degree for axis, degree in layout._asdict().items()}
    amp = {"Engine.mix_precision.enable": half, "Engine.mix_precision.level": "O2"}
    everything = {**SMALL, **degrees, **amp, **keys}
    return load(None, [Override(key, str(value), "-o") for key, value in everything.items()], Machines(1, layout.world))


def rows_of(layout: Layout, rank: int = 0, half: bool = False, **keys: object) -> list[Row]:
    return collectives(resolved(layout, half, **keys).run, layout, rank)


def sent(rows: list[Row]) -> dict[str, int]:
    return {axis: own for axis, own, _ in totals(rows)}


TEMPLATES = {
    "dp8": (0,),
    "sharding8": (0,),
    "mp2-sharding4": (0,),
    "dp2-mp2-pp2": (0, 7),
    "6.7B-sharding16": (5,),
    "175B-mp8-pp16": (0, 77, 127),
}


@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, ranks in TEMPLATES.items() for rank in ranks])
def test_golden(name: str, rank: int) -> None:
    """What is kept in tests/golden/collectives, which somebody has read."""
    loaded = load(ROOT / "templates" / "configs" / f"{name}.yaml")
    rows = collectives(loaded.run, loaded.layout, rank)
    text = "".join(f"{json.dumps({**row._asdict(), 'sent': row.sent})}\n" for row in rows)
    file = GOLDEN / f"{name}-rank{rank}.jsonl"
    if os.environ.get("GOLDEN") == "update":
        file.write_text(text)
    assert text == file.read_text()


def test_data_parallel_sends_fp32_gradients_once() -> None:
    for half in (False, True):
        assert sent(rows_of(Layout(dp=8), half=half))["dp"] == 2 * 7 * 4 * P // 8


@pytest.mark.parametrize(("stage", "gathers", "reduces"), [(1, 1, 1), (2, 1, M), (3, 2 * M, M)])
def test_zero(stage: int, gathers: int, reduces: int) -> None:
    """Parameters travel in half, gradients in fp32. All rows divide by 8."""
    rows = rows_of(Layout(sharding=8), half=True, **{STAGE: stage})
    assert sent(rows)["sharding"] == 7 * P * (2 * gathers + 4 * reduces) // 8
    hybrid = sent(rows_of(Layout(dp=2, sharding=8), half=True, **{STAGE: stage}))
    assert hybrid["sharding"] == sent(rows)["sharding"]
    assert hybrid["dp"] == 4 * P // 8  # once per update, whatever the stage


def test_tensor_parallel_is_that_of_megatron() -> None:
    """Per layer 2 + 2 all-reduces of s b h, one of the embedding, one of the head, 3 numbers per token of the loss."""
    hidden = 2 * S * B * H
    per_micro_batch = (4 * L + 2) * hidden + 3 * 4 * S * B
    assert sent(rows_of(Layout(mp=4), half=True))["mp"] == M * 2 * 3 * per_micro_batch // 4
    # With sequence_parallel as much, two gathers more per layer, and the gradients of what is not split.
    whole = 2 * M * (per_micro_batch + L * hidden) + 2 * 4 * (6 * H * L + S * H + 2 * H)
    rows = rows_of(Layout(mp=4), half=True, **{SEQUENCE: True})
    assert sent(rows)["mp"] == 3 * whole // 4


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_pipeline_sends_hidden_states(virtual: int) -> None:
    """Every boundary is crossed in both directions; the ends sum the tied embedding."""
    ranks = [sent(rows_of(Layout(pp=4), rank, half=True, **{VIRTUAL: virtual})) for rank in range(4)]
    assert sum(each["pp"] for each in ranks) == 2 * (4 * virtual - 1) * M * 2 * S * B * H
    assert [each.get("tied", 0) for each in ranks] == [4 * V * H, 0, 0, 4 * V * H]


def test_no_row_is_above_the_minimum_without_a_reason() -> None:
    for layout, stage, sequence in product(factorings(8), (1, 2, 3), (False, True)):
        if layout.pp <= L and layout.pp <= M:
            for rank in (0, layout.world - 1):
                for row in rows_of(layout, rank, **{STAGE: stage, SEQUENCE: sequence}):
                    assert row.sent == row.needed or (row.sent > row.needed and row.reason), row


def test_reasons() -> None:
    uneven = rows_of(Layout(sharding=3), **{"Global.global_batch_size": 96})
    assert reasons(uneven) == ["sharding: FSDP pads the rows of every parameter to a multiple of the ranks"]
    (repeated,) = reasons(rows_of(Layout(mp=2, pp=2)))
    assert repeated.startswith("pp: every mp rank sends the whole hidden state")
    assert reasons(rows_of(Layout(pp=2))) == []


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 3 << 29)] == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"]
