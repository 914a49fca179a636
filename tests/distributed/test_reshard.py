"""A checkpoint belongs to no layout. Oracle: the run that was never interrupted, on one process or in the same layout."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts import ALONE, Case, cases
from tests.distributed.test_resume import assert_equal, tensors_of
from tests.ranks import Ended, run, tiny
from trainer.checkpoint.manifest import read_manifest

LOSS = 5e-6
STEPS, MORE = 4, 4

SAVED = [ALONE, Case(sharding=2, mp=2, stage=3), Case(pp=2, sharding=2), Case(pp=2, mp=2, sequence=True)]
GOES_ON = [ALONE, Case(dp=2), Case(sharding=4, stage=3), Case(mp=2), Case(pp=2, virtual=2), Case(sharding=2, mp=2)]
# All 24 in `make test-long`; every layout of either side once in `make test`.
PAIRS = [
    pytest.param(here, there, id=f"{here.name}-to-{there.name}", marks=[pytest.mark.long] * ((row + column) % 4 != 2))
    for row, here in enumerate(SAVED)
    for column, there in enumerate(GOES_ON)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def once(case: Case) -> Path:
        folder = tmp_path_factory.mktemp(case.name)
        ended = run(folder, *tiny(**case.keys(), max_steps=STEPS), world=case.world)
        assert ended.ok, ended.text
        return folder / "output" / f"step_{STEPS}"

    return once


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("whole"), *tiny(**ALONE.keys(), max_steps=STEPS + MORE))


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_any_layout_goes_on_with_what_any_other_saved(
    tmp_path: Path, saved, uninterrupted: Ended, here: Case, there: Case
) -> None:
    """Weights, moments, learning rate and the place in the data."""
    ended = run(tmp_path, *tiny(**there.keys(), max_steps=STEPS + MORE, ckpt_dir=saved(here)), world=there.world)
    assert ended.ok, ended.text
    rest = uninterrupted.metrics()[STEPS:]
    assert len(ended.metrics()) == MORE
    assert max(abs(a - b) for a, b in zip(ended.metrics(), rest)) <= LOSS
    norms = zip(ended.metrics("grad_norm"), uninterrupted.metrics("grad_norm")[STEPS:])
    assert max(abs(a / b - 1) for a, b in norms) <= LOSS


def test_the_comparison_notices_another_learning_rate(tmp_path: Path, saved, uninterrupted: Ended) -> None:
    """Far outside of the tolerance."""
    keys = {**ALONE.keys(), "max_lr": 2e-3, "max_steps": STEPS + MORE, "ckpt_dir": saved(Case(pp=2, sharding=2))}
    ended = run(tmp_path, *tiny(**keys))
    assert max(abs(a - b) for a, b in zip(ended.metrics(), uninterrupted.metrics()[STEPS:])) > 100 * LOSS


@pytest.mark.parametrize("here", cases(SAVED))
def test_a_checkpoint_is_one_copy_of_the_state(saved, here: Case) -> None:
    """Every rank wrote its own part and nothing twice: the bytes of all files are those of one process, but headers."""
    folder, alone = saved(here), saved(ALONE)
    shapes = {name: tensor.shape for name, tensor in tensors_of(alone).items()}
    assert {name: tensor.shape for name, tensor in tensors_of(folder).items()} == shapes
    tensors = sum(4 * shape.numel() for shape in shapes.values())
    files = read_manifest(folder)["files"].values()
    assert len(files) == here.world
    chunks = 3 * 53 * here.world  # tensors at most, each with an entry in a header
    assert tensors <= sum(file["bytes"] for file in files) < tensors + 512 * chunks


BALANCED = [Case(dp=4), Case(dp=2, mp=2), Case(dp=2, sharding=2), Case(pp=2)]


@pytest.mark.parametrize("here", cases(BALANCED))
def test_all_ranks_write_as_much(saved, here: Case) -> None:
    """Within 5 % of an equal share of one copy. The last stage of a pipeline writes a part of the embedding."""
    written: Counter[str] = Counter()
    for facts in read_manifest(saved(here))["tensors"].values():
        for file, _, _, sizes in facts["pieces"]:
            written[file] += math.prod(sizes)
    total = sum(tensor.numel() for tensor in tensors_of(saved(here)).values())
    assert sum(written.values()) == total
    assert len(written) == here.world
    assert max(written.values()) < 1.05 * total / here.world
    assert min(written.values()) > 0.95 * total / here.world


@pytest.mark.parametrize("here", cases(SAVED[1:]))
def test_weights_on_the_disk_are_those_of_one_process(saved, here: Case) -> None:
    """Within a hundredth of the learning rates so far: Adam enlarges the rounding of a gradient that is almost zero."""
    mine, right = tensors_of(saved(here)), tensors_of(saved(ALONE))
    assert all(torch.allclose(mine[name], right[name], atol=4e-5) for name in right)


DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SAME = [Case(sharding=2, stage=3), Case(mp=2), Case(pp=2, virtual=2)]
SAME_LONG = [Case(sharding=2), Case(mp=2, sequence=True), Case(pp=2), Case(sharding=2, mp=2, pp=2)]


@pytest.mark.parametrize(
    "case", [*cases(SAME), *(pytest.param(case, id=case.name, marks=pytest.mark.long) for case in SAME_LONG)]
)
def test_ten_and_ten_are_twenty(tmp_path: Path, case: Case) -> None:
    """Bit for bit in the same layout, with dropout on: losses, norms, weights and moments."""
    keys = {**case.keys(), **DROPOUT}
    whole = run(tmp_path / "whole", *tiny(**keys, max_steps=20), world=case.world)
    half = run(tmp_path / "half", *tiny(**keys, max_steps=10), world=case.world)
    rest = run(tmp_path / "half", *tiny(**keys, max_steps=20, ckpt_dir="auto"), world=case.world)
    assert whole.ok, whole.text
    assert half.ok, half.text
    assert rest.ok, rest.text
    assert rest.metrics() == whole.metrics()
    assert rest.metrics("grad_norm") == whole.metrics("grad_norm")
    assert_equal(rest.folder / "output" / "step_20", whole.folder / "output" / "step_20")


def test_a_sample_is_written_where_no_rank_has_the_whole_model(tmp_path: Path) -> None:
    """From the checkpoint. Oracle: the sample of one process, which has the same weights but for rounding."""
    runs = [
        run(tmp_path / case.name, *tiny(**case.keys(), samples=1), world=case.world)
        for case in (ALONE, Case(sharding=2, pp=2, stage=3))
    ]
    alone, spread = (ended.out[0] for ended in runs)
    samples = [re.sub(r"(?m)^\[.*?INFO\] - ", "", text[text.index("Sample text after") :]) for text in (alone, spread)]
    assert samples[0][:60] == samples[1][:60]


def test_the_facts_of_a_checkpoint_name_its_layout(saved) -> None:
    facts = read_manifest(saved(Case(pp=2, sharding=2)))
    assert facts["layout"] == {"dp": 1, "pp": 2, "sharding": 2, "mp": 1}
    assert json.dumps(facts["config"])
