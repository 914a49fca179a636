"""Rehearses one update of one rank, without memory, GPUs or other ranks.

    rehearse(run, layout, rank).peak.total

The trainer's own code runs, on fake tensors and with fake collectives: both have sizes, but nothing
is stored, computed or sent. So any rank of any layout can be rehearsed on one CPU core. A config
for GPUs is rehearsed as it runs there, without torch.compile. Not counted: what kernels allocate
for themselves, and what nccl or gloo hold. With `sharding_offload`, host memory counts too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.allocations import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Allocations,
    Peak,
)
from trainer.config.sections import RunConfig
from trainer.counting import Call, Collectives
from trainer.data import LocalBatch
from trainer.device import behaves_as
from trainer.layout import UNKNOWN_VOCAB, Layout
from trainer.memory import few_micro_batches
from trainer.mesh import Mesh, join_alone
from trainer.optim import Optimizer
from trainer.parallel import Parallel, with_memory, without_memory
from trainer.precision import Precision
from trainer.rank_plan import BACKWARD, FORWARD, UPDATE


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in an update."""

    run: RunConfig  # as rehearsed: perhaps with fewer micro-batches
    peaks: Mapping[str, Peak]  # by phase
    calls: Counter[Call]
    flops: int  # of matrix products and attention, recomputed ones included
    seconds: float

    @property
    def micro_batches(self) -> int:
        return self.run.Engine.accumulate_steps

    @property
    def peak(self) -> Peak:
        """The peak of the training; building the model may need more for a moment."""
        phases = [self.peaks[phase] for phase in (FORWARD, BACKWARD, UPDATE)]
        return max(phases, key=lambda peak: peak.total)


class _NoMemory(FakeTensorMode):
    """Tensors without memory. Kernels that torch cannot run on them raise an error.

    By default it would allocate memory for their arguments, as much as a GPU has.
    """

    def __init__(self) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.tensor_lr:
            return None  # works in place; torch 2.13 can run it only with a rate on the host
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def rehearse(run: RunConfig, layout: Layout, rank: int) -> Rehearsal:
    began, run = time.perf_counter(), rehearsed_config(run, layout)
    kind = "cuda" if run.Global.device == "gpu" else "cpu"
    with ExitStack() as stack:
        mesh = stack.enter_context(join_alone(layout, rank))
        stack.enter_context(behaves_as(kind))
        precision = Precision(run.Engine.mix_precision, mesh.device.type, layout.sharding > 1)
        parts = without_memory(run, mesh, precision)
        # From here on, no tensor has memory.
        stack.enter_context(_NoMemory())
        sent = stack.enter_context(Collectives(mesh)) if layout.world > 1 else None
        counted = stack.enter_context(Allocations(kind))  # the last one: it counts references
        if kind == "cuda":
            stack.enter_context(_dropout_of_gpus())
        parallel = with_memory(run, mesh, precision, parts)
        _one_update(run, mesh, parallel, counted)
        calls = sent.calls if sent else Counter[Call]()
        return Rehearsal(run, counted.peaks(), calls, counted.flops, time.perf_counter() - began)


def rehearsed_config(run: RunConfig, layout: Layout) -> RunConfig:
    """The same run with as few micro-batches as have the same peak."""
    count = few_micro_batches(run, layout)
    local = count * run.Global.micro_batch_size
    sizes = replace(run.Global, local_batch_size=local, global_batch_size=local * layout.data_ranks)
    model = replace(run.Model, vocab_size=run.Model.vocab_size or UNKNOWN_VOCAB)
    if run.Global.device == "gpu":
        # Attention keeps no scores there, but torch's CPU kernel does if it has to drop some.
        model = replace(model, attention_probs_dropout_prob=0.0)
    return replace(
        run,
        Global=sizes,
        Engine=replace(run.Engine, accumulate_steps=count, compile="false"),
        Model=model,
    )


def _one_update(run: RunConfig, mesh: Mesh, parallel: Parallel, counted: Allocations) -> None:
    """As in `train.py`, without what it reads from the device."""
    optimizer = Optimizer(parallel.weights, run.Optimizer, mesh.device)
    counted.mark(PARAMETERS, (weight.local for weight in optimizer.weights))
    for weight in optimizer.weights:
        counted.mark(OPTIMIZER, (weight.exp_avg, weight.exp_avg_sq, weight.master, weight.step))
    parallel.train()
    with _phases(parallel, counted):
        loss = parallel.gradients(_batch(run), 1.0, 0)
    counted.mark(GRADIENTS, (weight.gradient for weight in optimizer.weights))
    counted.phase = UPDATE
    loss, square = loss.double(), optimizer.squared_norm()
    told = torch.ones_like(loss)  # predicted tokens, stop requests
    # A logged step has the step times of all ranks, too.
    times = [told] * mesh.world if run.Engine.logging_freq == 1 else []
    summary = mesh.summed(torch.stack([loss, square, told, told, *times]))
    optimizer.step(summary[1].sqrt(), told)
    optimizer.zero_grad()


def _batch(run: RunConfig) -> LocalBatch:
    shape = run.Global.local_batch_size, run.Data.Train.dataset.max_seq_len
    return LocalBatch(*(torch.zeros(shape, dtype=torch.long) for _ in range(2)))


@contextmanager
def _phases(parallel: Parallel, counted: Allocations) -> Iterator[None]:
    """Tell the counter where forward and backward passes begin, and what is a gradient."""
    backward = torch.autograd.backward

    def forward_begins(*_: Any) -> None:
        counted.phase = FORWARD

    def counted_backward(*args: Any, **kwargs: Any) -> None:
        counted.mark_rest(ACTIVATIONS)
        counted.phase = BACKWARD
        backward(*args, **kwargs)
        counted.mark(GRADIENTS, held_gradients(parallel))

    hooks = [part.register_forward_pre_hook(forward_begins) for part in parallel.parts]
    if hasattr(parallel.runner, "schedule"):
        # The stages would vote on whether to exchange shapes, and read the result.
        parallel.runner.schedule._warmup_p2p = _all_shapes_are_known
    torch.autograd.backward = counted_backward
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()


def _all_shapes_are_known(stages: Any, *_: Any) -> None:
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def held_gradients(parallel: Parallel) -> Iterator[Tensor | None]:
    """All gradients between two backward passes: main gradients, torch's own, and FSDP's."""
    for weight in parallel.weights:
        yield weight.main_gradient
        yield weight.parameter.grad
    for part in parallel.parts:
        for parameter in part.parameters():  # with sharding, others while they are gathered
            yield parameter.grad
        for module in part.modules():
            yield from _accumulated(module)


def _accumulated(module: nn.Module) -> Iterator[Tensor | None]:
    """What FSDP keeps of gradients that it has not reduced yet, or not over all replicas."""
    state: Any = getattr(module, "_get_fsdp_state", None)
    for group in state()._fsdp_param_groups if state else []:
        yield group._partial_reduce_output
        yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)


@contextmanager
def _dropout_of_gpus() -> Iterator[None]:
    """GPUs keep a mask with one byte per element; torch's CPU kernel keeps a factor."""
    dropout = F.dropout

    def fused(x: Tensor, probability: float, training: bool) -> Tensor:
        result: Tensor = torch.native_dropout(x, probability, training)[0]
        return result

    F.dropout = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = dropout
