"""What a terminal shows before the first step: at most eight lines, whatever the layout."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_logs_terminal import STAMP, Watch, train
from trainer.banner import announce, model_size
from trainer.checkpoint.signing import VARIABLE
from trainer.config import Override, load
from trainer.config.sections import RunConfig
from trainer.data import Length, Splits
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.metrics import Log

COLUMNS = 80
SPLIT: Any = SimpleNamespace(size=1_799_942)
CHARACTERS: Any = SimpleNamespace(length=2_000_000, vocabulary="x" * 96)


def config(*overrides: str) -> RunConfig:
    small = ("Model.name=GPT", "Model.num_layers=4", "Model.hidden_size=128", "Model.num_attention_heads=4")
    every = (*small, "Global.device=cpu", "Engine.max_steps=500000", *overrides)
    return load(None, [Override.parse(each) for each in every], None).run


def banner(run: RunConfig, layout: Layout, rank: int) -> str:
    stream = io.StringIO()
    mesh = Mesh(layout, rank, 0, torch.device("cpu"))
    announce(run, mesh, Log("fleetx", rank, stream), Splits(SPLIT, SPLIT, SPLIT, CHARACTERS), Length(500_000, 10), [])
    return stream.getvalue()


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(), []),
        (
            Layout(pp=2, sharding=2),
            [
                *("Distributed.pp_degree=2", "Distributed.sharding.sharding_degree=2"),
                *("Distributed.sharding.sharding_stage=2", "Global.global_batch_size=48"),
                *("Global.local_batch_size=24", "Global.micro_batch_size=12"),
            ],
        ),
    ],
)
def test_the_banner_has_eight_lines_at_most(tmp_path: Path, layout: Layout, overrides: list[str]) -> None:
    """Oracles: the number of lines before the first step, and the width of a window; no line of a rank is among them,
    but all of them are counted."""
    watch, run = Watch(tmp_path, total_steps=500_000), config(*overrides)
    for rank in range(layout.world):
        watch.job.add(f"workerlog.{rank}", banner(run, layout, rank))
    watch.look()
    watch.job.add("workerlog.0", f"{STAMP}{train(1)}\n")
    watch.look()
    shown = watch.lines()[:-1]
    assert len(shown) <= 8
    num_config = banner(run, layout, 0).count("\n  ")
    rank_lines = f"{num_config} config lines and {3 * layout.world} rank lines"
    assert shown[-1] == f"… {rank_lines} hidden: gptctl logs job-1 --raw"
    assert not any("rank 0: " in line for line in shown)
    # The first text is FleetX's, and the second has a path of any length.
    wide = [line for line in shown if len(line) > COLUMNS]
    assert not [line for line in wide if "The distributed run" not in line and "Checkpoints:" not in line]


def test_the_banner_says_that_checkpoints_are_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, end in (("", "and at the end\n"), ("a" * 32, "and at the end, signed\n")):
        with monkeypatch.context() as context:
            context.delenv(VARIABLE, raising=False)
            if key:
                context.setenv(VARIABLE, key)
            text = banner(config(), Layout(), 0)
        assert text.endswith(end)
        assert not key or key not in text


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (37_760, "37.76 K (37,760 parameters)"),
        (1_000_000, "1.00 M (1,000,000 parameters)"),
        (999_999_999, "1000.00 M (999,999,999 parameters)"),
        (1_313_722_368, "1.31 B (1,313,722,368 parameters)"),
    ],
)
def test_a_small_model_has_a_size(parameters: int, text: str) -> None:
    """Oracle: the numbers, by hand; FleetX's log has `Model Size: 1.31 B`."""
    assert model_size(parameters) == text
