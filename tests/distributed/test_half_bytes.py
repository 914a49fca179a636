"""What half precision keeps and sends. Oracle: arithmetic on the number of parameters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.distributed.layouts import Case
from tests.distributed.measured import Trained, measuring_main, train
from tests.distributed.test_half import half
from trainer import train as loop
from trainer.state import Training


class Kept:
    """Bytes of half-precision weights that autograd keeps between the two passes of a micro-batch."""

    def __init__(self, t: Training) -> None:
        self.shapes = {tuple(sorted(weight.at.whole)) for weight in t.parallel.weights if len(weight.at.whole) > 1}
        self.saved: list[Tensor] = []
        self.bytes = 0
        self.backward = torch.autograd.backward

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor

    def counted(self, *args: Any, **kwargs: Any) -> None:
        weights = [tensor for tensor in self.saved if tuple(sorted(tensor.shape)) in self.shapes]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in weights
            if tensor.dtype.itemsize == 2
        }
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in storages.values()))
        self.saved.clear()
        self.backward(*args, **kwargs)


def counting_main(arguments: Sequence[str]) -> int:
    """The trainer, whose second update is watched closely."""
    compute_gradients = loop.compute_gradients

    def watched(t: Training, *args: Any) -> Any:
        if t.progress.step != 1:
            return compute_gradients(t, *args)
        kept, backward = Kept(t), torch.autograd.backward
        torch.autograd.backward = kept.counted
        with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            result = compute_gradients(t, *args)
        torch.autograd.backward = backward
        numel = sum(weight.parameter.numel() for weight in t.parallel.weights)
        Path(f"counted.{t.mesh.rank}").write_text(json.dumps([kept.bytes, numel]))
        return result

    loop.compute_gradients = watched
    return measuring_main(arguments)


# 3 samples of 16 tokens: no activation has the shape of a weight.
SAMPLES: dict[str, Any] = {"micro_batch": 3, "max_steps": 4, "eval_freq": 0, "test_iters": 0}


def counted(folder: Path, case: Case, accumulate: int, **keys: Any) -> tuple[Trained, int, int]:
    """Also bytes of weights that autograd keeps, and the number of parameters, both of the first rank."""
    sizes = SAMPLES | {"global_batch": 3 * accumulate * case.layout.data_ranks}
    trained = train(folder, case, entry=counting_main, **{**sizes, **keys})
    return trained, *json.loads((folder / "counted.0").read_text())


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def sent(trained: Trained, operation: str, axis: str) -> dict[str, int]:
    """Bytes by dtype that the first rank sends in an update."""
    found: dict[str, int] = defaultdict(int)
    for call, number in trained.sent[0].counted.items():
        if (call.operation, call.axis) == (operation, axis):
            found[call.dtype] += number * call.nbytes
    return found


@pytest.mark.parametrize(("stage", "level"), [(3, "O1"), long(1, "O2"), long(2, "O1"), long(3, "O2")])
def test_sharding_gathers_half_and_keeps_fp32_shards(tmp_path: Path, stage: int, level: str) -> None:
    """Two micro-batches. Stage 3 keeps no gathered weights between the passes, and nothing needs a master copy."""
    trained, kept, numel = counted(tmp_path, Case(sharding=2, stage=stage), 2, **half("bfloat16", level))
    gathered = 1 if stage < 3 else 2 * 2  # per update, or in both passes of every micro-batch
    assert sent(trained, "all_gather", "sharding") == {"bfloat16": gathered * 2 * numel}
    assert sent(trained, "reduce_scatter", "sharding") == {"float32": (1 if stage == 1 else 2) * 4 * numel}
    for held in trained.held:
        assert held.parameters == 4 * numel // 2 + (2 * numel if stage < 3 else 0)
        assert held.gradients[0] == (4 * numel if stage == 1 else 4 * numel // 2)
        assert held.optimizer == 8 * numel // 2
    assert (kept == 0) == (stage == 3)
    assert kept <= 2 * numel


@pytest.mark.parametrize("stage", [2, long(3)])
def test_replicas_of_shards_are_reduced_once_per_update(tmp_path: Path, stage: int) -> None:
    """Over sharding with each of three micro-batches, over dp with the last one."""
    trained, _, numel = counted(tmp_path, Case(dp=2, sharding=2, stage=stage), 3)
    assert sent(trained, "reduce_scatter", "sharding") == {"float32": 3 * 4 * numel}
    assert sent(trained, "all_reduce", "dp") == {"float32": 4 * numel // 2}


@pytest.mark.parametrize("level", ["O2", long("O1")])
def test_data_parallel_sends_one_fp32_gradient(tmp_path: Path, level: str) -> None:
    """And holds no other one while it adds up three micro-batches."""
    trained, _, numel = counted(tmp_path, Case(dp=2), 3, **half("bfloat16", level))
    assert sent(trained, "all_reduce", "dp") == {"float32": 4 * numel}
    for held in trained.held:
        assert held.gradients == [4 * numel] * 3
        assert held.parameters == (4 if level == "O1" else 2) * numel
        assert held.optimizer == (8 if level == "O1" else 12) * numel


@pytest.mark.parametrize(("level", "sharding"), [("O1", 1), long("O2", 1), long("O1", 2)])
def test_pipelines_send_half(tmp_path: Path, level: str, sharding: int) -> None:
    """Hidden states (3, 16, 32) of every micro-batch, in both directions. All forward passes use the same half weights."""
    case = Case(pp=2, sharding=sharding, schedule="GPipe")
    trained, kept, numel = counted(tmp_path, case, 4, **half("float16", level))
    hidden = 3 * 16 * 32 * 2
    assert sent(trained, "send", "pp") == sent(trained, "recv", "pp") == {"float16": 4 * hidden}
    assert 0 < kept <= 2 * numel
