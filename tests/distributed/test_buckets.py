"""How gradients travel over gloo. Oracle: the all-reduces that the profiler of torch sees in one update."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from tests.ranks import Ranks, tiny
from trainer import train
from trainer.__main__ import main
from trainer.data import LocalBatch
from trainer.layout import Layout
from trainer.mesh import connect
from trainer.optim import new_weight
from trainer.parallel.axis_collectives import AxisCollectives
from trainer.parallel.data import Buckets
from trainer.shared_memory import SWITCH
from trainer.slices import Slice
from trainer.state import Training


def counting_main(arguments: Sequence[str]) -> int:
    """The trainer, with the all-reduces of the gradients of the last step counted."""
    compute_gradients = train.compute_gradients

    def counted(t: Training, batch: LocalBatch) -> object:
        if t.progress.step < 3:
            return compute_gradients(t, batch)
        with profile() as profiled:
            loss = compute_gradients(t, batch)
        Path("count").write_text(str(sum(event.name == "gloo:all_reduce" for event in profiled.events())))
        return loss

    train.compute_gradients = counted  # type: ignore[assignment]
    return main(arguments)


def all_reduces(folder: Path, **keys: object) -> int:
    folder.mkdir(exist_ok=True)
    ended = Ranks(tiny(max_steps=4, hidden=128, layers=4, **keys), 2, folder, {SWITCH: "0"}, counting_main).wait()
    assert ended.ok, ended.text
    return int((folder / "count").read_text())


def test_gradients_travel_in_buckets_of_the_size_asked_for(tmp_path: Path) -> None:
    """0.8 million parameters are 3.3 MB: one bucket of 25 MB, many of 0.2 MB."""
    large = all_reduces(tmp_path / "large")
    small = all_reduces(tmp_path / "small", **{"Distributed.bucket_cap_mb": 0.2})
    norm = 1  # one more sum per update: the summary of the step
    assert large == 1 + norm
    assert 8 <= small - norm <= 17


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_synchronises_once_per_update(tmp_path: Path, micro_batch: int) -> None:
    once = all_reduces(tmp_path / "once", micro_batch=4)
    assert all_reduces(tmp_path / "accumulated", micro_batch=micro_batch) == once


def averaging_main(_: Sequence[str]) -> int:
    """Four parameters in two buckets, of which a rank has gradients for some only, in two micro-batches."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = connect(Layout(dp=2), rank, rank, torch.device("cpu"), timedelta(seconds=60))
    assert ("dp" in mesh.shared_groups) == (os.environ[SWITCH] == "1")
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    weights = [
        new_weight(str(number), parameter, Slice.of((2,)), torch.ones(2), has_master=False)
        for number, parameter in enumerate(parameters)
    ]
    buckets = Buckets(weights, 9e-6, 2, AxisCollectives.along("dp", mesh))
    assert len(buckets.buckets) == 2
    for _ in range(2):  # updates
        buckets.begin()
        for factor in (1, 2):
            used = parameters[:3] if rank == 0 else parameters[1:]
            sum((factor + 10 * rank) * parameter.sum() for parameter in used).backward()
        buckets.finish()
        Path(f"averages.{rank}").write_text(str([weight.gradient.tolist()[0] for weight in weights]))
    dist.destroy_process_group()
    return 0


@pytest.mark.parametrize("in_shared_memory", ["0", "1"])
def test_a_rank_may_have_no_gradient_for_a_parameter(tmp_path: Path, in_shared_memory: str) -> None:
    """Such a gradient counts as zero. Oracle: 1 + 2 on the first rank, 11 + 12 on the second one, divided by two."""
    ended = Ranks([], 2, tmp_path, {SWITCH: in_shared_memory}, averaging_main).wait()
    assert ended.ok, ended.text
    expected = str([1.5, 13.0, 13.0, 11.5])
    assert [(tmp_path / f"averages.{rank}").read_text() for rank in range(2)] == [expected] * 2
