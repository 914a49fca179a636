"""What half precision keeps and sends. Oracles: arithmetic on the number of parameters, and the operators that torch runs."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.layouts import Case
from tests.distributed.measured import Trained, measuring_main, train
from tests.distributed.test_half import half
from trainer import train as loop
from trainer.state import Training

GATHER, REDUCE_SCATTER, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


class Messages(TorchDispatchMode):
    """Bytes by operator and dtype: of the whole tensor that is gathered, reduced or sent."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0]
            sent = args[1] if name == REDUCE_SCATTER else args[0]
            for tensor in [sent] if isinstance(sent, Tensor) else sent:
                self.bytes[f"{name} {tensor.dtype}"] += tensor.nbytes
        return func(*args, **(kwargs or {}))


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
        with Messages() as messages, saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            result = compute_gradients(t, *args)
        torch.autograd.backward = backward
        numel = sum(weight.parameter.numel() for weight in t.parallel.weights)
        Path(f"counted.{t.mesh.rank}").write_text(json.dumps([messages.bytes, kept.bytes, numel]))
        return result

    loop.compute_gradients = watched
    return measuring_main(arguments)


# 3 samples of 16 tokens: no activation has the shape of a weight.
SAMPLES: dict[str, Any] = {"micro_batch": 3, "max_steps": 3, "eval_freq": 0, "test_iters": 0}


def counted(folder: Path, case: Case, accumulate: int, **keys: Any) -> tuple[Trained, dict[str, int], int, int]:
    """Of the first rank: bytes of messages, bytes of weights that autograd keeps, number of parameters."""
    sizes = SAMPLES | {"global_batch": 3 * accumulate * case.layout.data_ranks}
    trained = train(folder, case, entry=counting_main, **{**sizes, **keys})
    return trained, *json.loads((folder / "counted.0").read_text())


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def only(messages: dict[str, int], name: str) -> dict[str, int]:
    return {key.split()[1]: size for key, size in messages.items() if key.split()[0] == name}


@pytest.mark.parametrize(("stage", "level"), [(3, "O1"), long(1, "O2"), long(2, "O1"), long(3, "O2")])
def test_sharding_gathers_half_and_keeps_fp32_shards(tmp_path: Path, stage: int, level: str) -> None:
    """Two micro-batches. Stage 3 keeps no gathered weights between the passes, and nothing needs a master copy."""
    trained, messages, kept, numel = counted(tmp_path, Case(sharding=2, stage=stage), 2, **half("bfloat16", level))
    gathered = 1 if stage < 3 else 2 * 2  # per update, or in both passes of every micro-batch
    assert only(messages, GATHER) == {"torch.bfloat16": gathered * 2 * numel}
    assert only(messages, REDUCE_SCATTER) == {"torch.float32": (1 if stage == 1 else 2) * 4 * numel}
    for held in trained.held:
        assert held.parameters == 4 * numel // 2 + (2 * numel if stage < 3 else 0)
        assert held.gradients[0] == (4 * numel if stage == 1 else 4 * numel // 2)
        assert held.optimizer == 8 * numel // 2
    assert (kept == 0) == (stage == 3)
    assert kept <= 2 * numel


@pytest.mark.parametrize("stage", [2, long(3)])
def test_replicas_of_shards_are_reduced_once_per_update(tmp_path: Path, stage: int) -> None:
    """Over sharding with each of three micro-batches, over dp with the last one."""
    _, messages, _, numel = counted(tmp_path, Case(dp=2, sharding=2, stage=stage), 3)
    assert only(messages, REDUCE_SCATTER) == {"torch.float32": 3 * 4 * numel}
    sums = only(messages, ALL_REDUCE)
    assert sums["torch.float32"] == 4 * numel // 2


@pytest.mark.parametrize("level", ["O2", long("O1")])
def test_data_parallel_sends_one_fp32_gradient(tmp_path: Path, level: str) -> None:
    """And holds no other one while it adds up three micro-batches."""
    trained, messages, _, numel = counted(tmp_path, Case(dp=2), 3, **half("bfloat16", level))
    assert only(messages, ALL_REDUCE)["torch.float32"] == 4 * numel
    for held in trained.held:
        assert held.gradients == [4 * numel] * 3
        assert held.parameters == (4 if level == "O1" else 2) * numel
        assert held.optimizer == (8 if level == "O1" else 12) * numel


@pytest.mark.parametrize(("level", "sharding"), [("O1", 1), long("O2", 1), long("O1", 2)])
def test_pipelines_send_half(tmp_path: Path, level: str, sharding: int) -> None:
    """Hidden states (3, 16, 32) of every micro-batch, in both directions. All forward passes use the same half weights."""
    case = Case(pp=2, sharding=sharding, schedule="GPipe")
    _, messages, kept, numel = counted(tmp_path, case, 4, **half("float16", level))
    hidden = 3 * 16 * 32 * 2
    assert only(messages, "send") == only(messages, "recv_") == {"torch.float16": 4 * hidden}
    assert 0 < kept <= 2 * numel
