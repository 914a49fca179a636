"""A minGPT config, its log lines and its snapshot file. Oracles: published lines, and the run that was not interrupted."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from gptctl.jobs.snapshots import read_snapshot
from tests.ranks import run, start

MINGPT = """
data_config: {path: text.txt, block_size: 8, truncate: 0.5, train_split: 0.9}
gpt_config: {n_layer: 2, n_head: 2, n_embd: 16}
trainer_config: {max_epochs: 10, batch_size: 20, data_loader_workers: 4, grad_norm_clip: 1.0, snapshot_path: gpt_snapshot.pt, save_every: 3, use_amp: False}
optimizer_config: {weight_decay: 0.1, learning_rate: 0.003}
"""
ITERATION = r"\[GPU(\d)\] Epoch (\d+) \| Iter (\d+) \| (Train|Eval) Loss (\d\.\d{5})"


@pytest.fixture
def mingpt(tmp_path: Path) -> Path:
    (tmp_path / "gpt.yaml").write_text(MINGPT + "Global: {device: cpu}\n")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path


def test_mingpt_lines_on_four_ranks(mingpt: Path) -> None:
    """450 characters: 442 windows, 397 to train on; batches of 4 · 20: 5 iterations, so only the first is shown."""
    ended = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=2", world=4)
    assert ended.ok, ended.text
    for rank, text in enumerate(ended.out):
        lines = text.splitlines()
        assert lines[:3] == ["Data has 450 characters, 28 unique.", "number of parameters: 0.01M", "Snapshot not found. Training model from scratch"]  # fmt: skip
        found = re.findall(ITERATION, text)
        assert [line[:4] for line in found] == [
            (str(rank), epoch, "0", kind) for epoch in "12" for kind in ("Train", "Eval")
        ]
        assert 2.9 < float(found[0][4]) < 3.8  # ln(28) = 3.33
        assert float(found[2][4]) < float(found[0][4])
    assert len(ended.metrics()) == 10


@pytest.mark.parametrize(
    "layout", [{}, {"Distributed.mp_degree": 2}, {"Distributed.pp_degree": 2, "Global.micro_batch_size": 10}]
)
def test_the_train_loss_of_a_rank_is_its_own(mingpt: Path, layout: dict[str, int]) -> None:
    """Oracle: the lines of the tutorial, where ranks differ; and the mean over the data, in metrics.jsonl."""
    keys = [f"{key}={value}" for key, value in layout.items()]
    ended = run(
        mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=1", *keys, "Engine.save_load.snapshot_path=", world=4
    )
    assert ended.ok, ended.text
    own = [float(re.findall(ITERATION, text)[0][4]) for text in ended.out]
    # All ranks have the same number of tokens, and those of one mp or pp group read the same ones.
    assert len(set(own)) == (2 if layout else 4)
    assert sum(own) / 4 == pytest.approx(ended.metrics()[0], abs=2e-5)


def test_snapshots_every_three_epochs(mingpt: Path) -> None:
    """At 3, 6 and 9 of 10, each before that epoch's evaluation; the last state is kept as well."""
    ended = run(mingpt, "-c", "gpt.yaml", GPTCTL_JOB="gpt-1")
    assert ended.ok, ended.text
    lines = ended.out[0].splitlines()
    saved = [number for number, line in enumerate(lines) if line.startswith("Snapshot saved")]
    assert [lines[number] for number in saved] == [f"Snapshot saved at epoch {epoch}" for epoch in (3, 6, 9)]
    for number, epoch in zip(saved, (3, 6, 9)):
        assert lines[number - 1].startswith(f"[GPU0] Epoch {epoch} | Iter 0 | Train Loss")
        assert lines[number + 1].startswith(f"[GPU0] Epoch {epoch} | Iter 0 | Eval Loss")
    assert lines[-1] == "Save model to gpt_snapshot.pt"
    saved_last = read_snapshot(str(mingpt / "gpt_snapshot.pt"))
    assert saved_last is not None
    assert (saved_last.epoch, saved_last.job) == (10, "gpt-1")
    again = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=11")
    assert "Resuming training from snapshot at Epoch 10" in again.out[0]
    assert re.findall(ITERATION, again.out[0])[0][1] == "11"


def test_a_snapshot_goes_on_with_another_number_of_ranks(mingpt: Path) -> None:
    """Batches are per rank, so an epoch has other steps: 5 on four ranks, 10 on two. Epoch 4 follows epoch 3."""
    run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=3", world=4)
    rest = run(mingpt, "-c", "gpt.yaml", "trainer_config.max_epochs=4", world=2)
    assert rest.ok, rest.text
    assert "Resuming training from snapshot at Epoch 3" in rest.out[1]
    assert {line[1] for line in re.findall(ITERATION, rest.out[0])} == {"4"}
    assert len(rest.metrics()) == 15 + 10


def test_interrupted_after_six_epochs_it_continues_at_seven(mingpt: Path) -> None:
    whole = run(mingpt, "-c", "gpt.yaml", "Engine.save_load.snapshot_path=whole.pt", "output_dir=whole")
    ranks = start(mingpt, "-c", "gpt.yaml")
    ranks.wait_for("Snapshot saved at epoch 6")
    ranks.kill(signal.SIGKILL)
    ranks.wait()
    rest = run(mingpt, "-c", "gpt.yaml")
    assert rest.ok, rest.text
    assert "Resuming training from snapshot at Epoch 6" in rest.out[0]
    tail = re.findall(ITERATION, whole.out[0])[12:]
    assert re.findall(ITERATION, rest.out[0]) == tail
    assert tail[0][1] == "7"


@pytest.mark.skipif("TINYSHAKESPEARE" not in os.environ, reason="TINYSHAKESPEARE names no copy of tinyshakespeare.txt")
def test_tinyshakespeare_is_counted_as_published(mingpt: Path) -> None:
    keys = [
        f"data_config.path={os.environ['TINYSHAKESPEARE']}",
        "data_config.truncate=0.05",
        "data_config.block_size=128",
    ]
    ended = run(mingpt, "-c", "gpt.yaml", *keys, "trainer_config.max_epochs=1", "Engine.max_steps=1")
    assert ended.out[0].startswith("Data has 55769 characters, 59 unique.\n")
