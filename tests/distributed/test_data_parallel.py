"""Data parallel training. The oracle of every run is the same training on one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks import Ended, run, tiny

LOSS = 5e-6  # absolute, over 10 fp32 steps
NORM = 5e-6  # relative


def assert_same(here: list[float], there: list[float], tolerance: float) -> None:
    assert len(here) == len(there)
    assert max(abs(a - b) for a, b in zip(here, there)) <= tolerance


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run(tmp_path_factory.mktemp("alone"), *tiny(micro_batch=8, **EVALUATION))
    assert ended.ok, ended.text
    return ended


EVALUATION = {"eval_freq": 5, "eval_iters": 2, "test_iters": 3}


def test_the_comparison_notices_a_mistake(tmp_path: Path, alone: Ended) -> None:
    """Another seed, another learning rate: far outside of the tolerance."""
    for number, change in enumerate(({"seed": 1}, {"max_lr": 1.1e-3})):
        other = run(tmp_path / str(number), *tiny(micro_batch=8, **change))
        assert max(abs(a - b) for a, b in zip(other.metrics(), alone.metrics())) > 100 * LOSS


def write_documents(folder: Path, vocab: int, end: int) -> None:
    folder.mkdir(parents=True)
    source = np.random.RandomState(0)
    documents = [[*source.randint(0, vocab, source.randint(3, 40)).tolist(), end] for _ in range(200)]
    ids = np.array([token for document in documents for token in document], dtype=np.uint16)
    np.savez(folder / "train.data.json_ids.npz", ids=ids, lens=np.array([len(document) for document in documents]))


@pytest.mark.parametrize("world", [1, 2])
def test_masked_tokens_are_counted_over_the_whole_batch(tmp_path: Path, world: int) -> None:
    """Every micro-batch holds another number of end tokens, and still the loss is that of the whole batch at once."""
    write_documents(tmp_path / "data", 500, end=50256)
    keys = {"dataset": "GPTDataset", "input_dir": tmp_path / "data", "vocab": 50257, "path": "", **EVALUATION}
    alone = run(tmp_path / "alone", *tiny(micro_batch=8, max_steps=5, **keys))
    split = run(tmp_path / "split", *tiny(micro_batch=1, max_steps=5, **keys), world=world)
    assert alone.ok, alone.text
    assert split.ok, split.text
    assert_same(split.metrics(), alone.metrics(), 2 * LOSS)  # of a loss near ln(50257), twice that of the characters
    assert_same(split.metrics("valid_loss"), alone.metrics("valid_loss"), 2 * LOSS)
    assert (tmp_path / "data" / "train.data.json_gpt_train_indexmap_40ns_16sl_doc_idx.npy").exists()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision_stays_near_fp32(tmp_path: Path, dtype: str, tolerance: float, world: int) -> None:
    amp = {
        "Engine.mix_precision.enable": True,
        "Engine.mix_precision.dtype": dtype,
        "Engine.mix_precision.scale_loss": 1024,
    }
    plain = run(tmp_path / "fp32", *tiny())
    half = run(tmp_path / "half", *tiny(**amp), world=world)
    assert half.ok, half.text
    differences = [abs(a - b) for a, b in zip(half.metrics(), plain.metrics())]
    assert 0 < max(differences) <= tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pure_half_trains_with_fp32_masters(tmp_path: Path, dtype: str) -> None:
    """O2 rounds every weight, so it is further from fp32 than O1: within 2 % of the loss, and falling alike."""
    amp = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": dtype, "Engine.mix_precision.level": "O2"}
    plain = run(tmp_path / "fp32", *tiny())
    pure = run(tmp_path / "pure", *tiny(**amp), world=2)
    assert pure.ok, pure.text
    assert max(abs(a / b - 1) for a, b in zip(pure.metrics(), plain.metrics())) < 0.02


@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_skips_the_update_on_all_ranks_and_the_rate_waits(tmp_path: Path, world: int) -> None:
    """A loss scale of 2³² overflows float16: it is halved until gradients are finite."""
    amp = {"Engine.mix_precision.enable": True, "Engine.mix_precision.scale_loss": 2.0**32}
    ended = run(tmp_path, *tiny(max_steps=30, **amp), world=world)
    assert ended.ok, ended.text
    scales, rates, norms = ended.metrics("loss_scale"), ended.metrics("lr"), ended.metrics("grad_norm")
    skipped = next(number for number, norm in enumerate(norms) if norm is not None)
    assert 5 < skipped < 25
    assert scales[skipped - 1] == 2.0 ** (32 - skipped)
    assert len(set(rates[:skipped])) == 1  # the schedule waits
    assert rates[skipped] != rates[skipped - 1]
    assert ended.text.count("update skipped, loss scale is now") == norms.count(None)
    losses = ended.metrics()
    assert losses[-1] < losses[0] - 0.1


def test_single_overflows_are_no_lack_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles after every two updates and overflows again and again, but never three times in a row."""
    monkeypatch.setattr("trainer.precision.GROWTH_INTERVAL", 2)
    monkeypatch.setattr("trainer.train.MAX_SKIPPED", 3)
    amp = {"Engine.mix_precision.enable": True, "Engine.mix_precision.scale_loss": 2.0**15}
    ended = run(tmp_path, *tiny(max_steps=40, **amp))
    assert ended.ok, ended.text
    assert ended.metrics("grad_norm").count(None) > 3


def test_without_progress_it_gives_up(tmp_path: Path) -> None:
    """A learning rate of 100 without clipping: weights overflow, and no gradient is finite ever again."""
    ended = run(
        tmp_path,
        *tiny(
            max_steps=1000,
            max_lr=100,
            **{"Optimizer.grad_clip": 0, "Optimizer.lr.warmup_rate": 0, "Optimizer.weight_decay": 1},
        ),
    )
    assert ended.codes == [93]
    assert "error: no progress: 100 updates in a row had no finite gradient" in ended.err[0]
    assert ended.status()["state"] == "failed"
