"""How gradients travel. Oracle: the all-reduces that the profiler of torch sees in one update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.profiler import profile

from tests.ranks import Ranks, tiny
from trainer import train
from trainer.__main__ import main
from trainer.data import LocalBatch
from trainer.state import Training


def counting_main(arguments: Sequence[str]) -> int:
    """The trainer, with the all-reduces of the gradients of the last step counted."""
    compute_gradients = train.compute_gradients

    def counted(t: Training, batch: LocalBatch, num_predicted: float) -> object:
        if t.progress.step < 3:  # DDP arranges its buckets anew after the first step
            return compute_gradients(t, batch, num_predicted)
        with profile() as profiled:
            loss = compute_gradients(t, batch, num_predicted)
        Path("count").write_text(str(sum(event.name == "gloo:all_reduce" for event in profiled.events())))
        return loss

    train.compute_gradients = counted  # type: ignore[assignment]
    return main(arguments)


def all_reduces(folder: Path, **keys: object) -> int:
    folder.mkdir(exist_ok=True)
    ended = Ranks(tiny(max_steps=4, hidden=128, layers=4, **keys), 2, folder, {}, counting_main).wait()
    assert ended.ok, ended.text
    return int((folder / "count").read_text())


def test_gradients_travel_in_buckets_of_the_size_asked_for(tmp_path: Path) -> None:
    """0.8 million parameters are 3.3 MB: one bucket of 25 MB (after the first, smaller one), many of 0.2 MB."""
    large = all_reduces(tmp_path / "large")
    small = all_reduces(tmp_path / "small", **{"Distributed.bucket_cap_mb": 0.2})
    assert 1 <= large <= 2
    assert 8 <= small <= 17


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_synchronises_once_per_update(tmp_path: Path, micro_batch: int) -> None:
    once = all_reduces(tmp_path / "once", micro_batch=4)
    assert all_reduces(tmp_path / "accumulated", micro_batch=micro_batch) == once
