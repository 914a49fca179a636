"""Gradients of many micro-batches. Oracles: sums in float64, and torch's own cross entropy."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT
from trainer.loss import EmbeddingGradient, chunked_loss
from trainer.optim import Weight, new_weight
from trainer.parallel.data import Buckets
from trainer.slices import Slice


def half_weights(sizes: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Weight]:
    """Vectors with fp32 masters."""
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    return [
        new_weight(str(number), parameter, Slice.of(parameter.shape), torch.ones(len(parameter)), has_master=True)
        for number, parameter in enumerate(parameters)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_added_in_fp32(dtype: torch.dtype) -> None:
    """1,536 micro-batches. Added in bfloat16, the sum of such gradients stops growing at 256."""
    (weight,) = weights = half_weights([64], dtype)
    buckets = Buckets(weights, 25, 1536, None)
    gradients = torch.rand(1536, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for update in (gradients, gradients * 2):  # the second one overwrites the first
        buckets.begin()
        for gradient in update:
            (weight.parameter * gradient).sum().backward()
            assert weight.parameter.grad is None
        buckets.finish()
        assert weight.gradient.dtype == torch.float32
        assert torch.allclose(weight.gradient.double(), update.double().sum(0), rtol=1e-5)


def test_parameters_without_gradients_have_zeros() -> None:
    """Also after an update in which they had some."""
    used, unused = weights = half_weights([3, 4])
    buckets = Buckets(weights, 25, 1, None)
    for loss in (used.parameter.sum() + unused.parameter.sum(), used.parameter.sum()):
        buckets.begin()
        loss.backward()
        buckets.finish()
    assert used.gradient.tolist() == [1.0] * 3
    assert unused.gradient.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("cap", "expected"), [(25, [[4, 3, 2, 1]]), (20e-6, [[4, 3], [2, 1]]), (1e-6, [[4], [3], [2], [1]])]
)
def test_buckets_are_filled_from_the_last_parameter_on(cap: float, expected: list[list[int]]) -> None:
    buckets = Buckets(half_weights([1, 2, 3, 4]), cap, 1, None).buckets
    assert [[view.numel() for view in bucket.views] for bucket in buckets] == expected
    assert [bucket.memory.buffer.numel() for bucket in buckets] == [sum(sizes) for sizes in expected]


VOCABULARY, HIDDEN, TOKENS = 40, 8, 6


class Largest(TorchDispatchMode):
    """Counts how many tensors of the embedding's size are created in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.created = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.created += "zeros" in str(func) and tuple(result.shape) == (VOCABULARY, HIDDEN)
        return result


def micro_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, TOKENS, HIDDEN, generator=source), torch.randint(VOCABULARY, (1, TOKENS), generator=source))
        for _ in range(number)
    ]


@pytest.mark.parametrize("number", [1, 5])
def test_forward_passes_share_one_embedding_gradient(number: int) -> None:
    """As in GPipe: all forward passes, then all backward passes, twice. Oracle: the loss from all logits at once."""
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sums, batches, right = EmbeddingGradient(), micro_batches(number), torch.zeros(())
    for x, labels in batches:
        right = right + 0.5 * F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(right, weight)
    for _ in range(2):
        weight.grad = None
        with Largest() as largest:
            losses = [chunked_loss(x, weight, labels, VOCABULARY, 0.5, sums) for x, labels in batches]
            for loss in losses:
                loss.backward()
        assert largest.created == 1
        assert torch.allclose(weight.grad, expected, atol=1e-5)
        assert sums.total is None


def test_a_loss_that_is_dropped_leaves_nothing_behind() -> None:
    weight, sums = torch.randn(VOCABULARY, HIDDEN).requires_grad_(), EmbeddingGradient()
    ((x, labels),) = micro_batches(1)
    chunked_loss(x, weight, labels, VOCABULARY, 1.0, sums)
    chunked_loss(x, weight, labels, VOCABULARY, 1.0, sums).backward()
    right = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert torch.allclose(weight.grad, torch.autograd.grad(right, weight)[0], atol=1e-5)


WITHOUT_COMPILER = """
import sys, torch, torch.distributed as dist
from torch import nn
from trainer.optim import new_weight
from trainer.parallel import parallelize
from trainer.parallel.axis_collectives import AxisCollectives
from trainer.parallel.data import Buckets
from trainer.slices import Slice
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parameter = nn.Parameter(torch.ones(3))
weight = new_weight("w", parameter, Slice.of((3,)), torch.ones(3), has_master=False)
buckets = Buckets([weight], 25, 1, AxisCollectives(dist.group.WORLD, None))
buckets.begin(); parameter.sum().backward(); buckets.finish()
assert weight.gradient.tolist() == [1, 1, 1]
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""


def test_data_parallel_does_not_import_the_compiler_of_torch() -> None:
    """It would take more than a second of every start. torch's DDP does."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ""
