"""Applies the axes of a layout to a model, in one named order. The model itself knows nothing of them.

`parallelize` names the order; what an axis does is told in the module of its name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.config.sections import RunConfig, Sharding
from trainer.data import LocalBatch
from trainer.dropout import Dropout
from trainer.layout import own_chunks
from trainer.mesh import Mesh
from trainer.model import GPT, initial_value, materialize
from trainer.optim import Precision, Weight, new_weight
from trainer.parallel.data import replicate
from trainer.parallel.tensor import split, split_dim
from trainer.slices import Holders, Slice


class Runner(Protocol):
    """What takes a batch through the model."""

    def gradients(self, batch: LocalBatch, factor: float) -> Tensor:
        """Forward and backward of one update; factor · the summed loss, 0 on ranks that do not see it."""

    def loss(self, batch: LocalBatch) -> Tensor:
        """The summed loss, 0 on ranks that do not see it."""


@dataclass
class Parallel:
    """The model as the layout runs it."""

    mesh: Mesh
    parts: list[
        GPT
    ]  # the layers of this rank: one range of them, or several in an interleaved pipeline
    runner: Runner
    weights: list[Weight]
    dropout: Dropout
    sequence_parallel: bool

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def gradients(self, batch: LocalBatch, factor: float, step: int) -> Tensor:
        """The runner's, and then what ranks have to add up that hold the same parameter but saw other parts of it."""
        self.dropout.begin(step)
        loss = self.runner.gradients(batch, factor)
        if self.sequence_parallel:
            self._add_up([weight for weight in self.weights if not weight.is_split], "mp")
        self._add_up([weight for weight in self.weights if weight.is_tied], "tied")
        return loss

    def _add_up(self, weights: list[Weight], axis: str) -> None:
        """All of them in one message."""
        if not weights or axis not in self.mesh.groups:
            return
        gradients = [weight.gradient for weight in weights]
        sums = self.mesh.summed(torch.cat([gradient.flatten() for gradient in gradients]), axis)
        for gradient, total in zip(
            gradients, sums.split([gradient.numel() for gradient in gradients])
        ):
            gradient.copy_(total.view_as(gradient))


def parallelize(run: RunConfig, mesh: Mesh, precision: Precision) -> Parallel:
    """First the pipeline's cut, then tensor parallel, sharding or copies, then memory and values, last the schedule."""
    layout, dropout = mesh.layout, Dropout(run, mesh)
    chunks = own_chunks(layout, run.Model.num_layers, run.Model.virtual_pp_degree, mesh.rank)
    interval = run.Distributed.pp_recompute_interval if layout.pp > 1 else 1
    with torch.device("meta"):
        parts = [GPT(run.Model, layers, interval) for _, layers in chunks]
    for part in parts:
        if layout.mp > 1:
            split(part, mesh, run.Model.sequence_parallel)
        precision.apply(part)
        dropout.attach(part)
        if layout.sharding > 1:
            from trainer.parallel.sharding import (
                shard,
            )  # as the pipeline below: torch's part takes a second to import

            shard(part, run.Distributed.sharding, mesh)
        materialize(part, rests_on(run.Distributed.sharding, mesh))
    weights = [weight for part in parts for weight in _initial_weights(part, run, mesh, precision)]
    copied = layout.dp > 1 and layout.sharding == 1
    modules = [
        replicate(part, run.Distributed.bucket_cap_mb, mesh) if copied else part for part in parts
    ]
    if layout.pp == 1:
        runner: Runner = OneStage(run, mesh, parts[0], modules[0])
    else:
        from trainer.parallel.pipeline import Pipeline

        stages = [(number, module) for (number, _), module in zip(chunks, modules)]
        runner = Pipeline(run, mesh, precision, stages)
    return Parallel(mesh, parts, runner, weights, dropout, run.Model.sequence_parallel)


def rests_on(sharding: Sharding, mesh: Mesh) -> torch.device:
    """Where parameters are between updates."""
    is_offloaded = mesh.layout.sharding > 1 and sharding.sharding_offload
    return torch.device("cpu") if is_offloaded else mesh.device


def _initial_weights(part: GPT, run: RunConfig, mesh: Mesh, precision: Precision) -> list[Weight]:
    at, layout, weights = mesh.at, mesh.layout, []
    for name, parameter in part.named_parameters():
        dim, shape = split_dim(name) if layout.mp > 1 else None, list(parameter.shape)
        if dim is not None:
            shape[dim] *= layout.mp
        piece = Slice.of(tuple(shape))
        piece = piece if dim is None else piece.chunk(dim, layout.mp, at.mp)
        piece = piece.chunk(0, layout.sharding, at.sharding)
        value = initial_value(name, piece, run.Model, run.Global.seed)
        weight = new_weight(name, parameter, piece, value, precision.is_pure)
        weight.is_split = dim is not None
        weight.is_tied = name == "word_embeddings.weight" and layout.pp > 1
        weight.is_copy = weight.is_tied and not part.is_first
        holders = Holders(layout.dp, at.dp)
        weight.holders = (
            holders
            if weight.is_split
            else Holders(layout.dp * layout.mp, at.dp * layout.mp + at.mp)
        )
        weights.append(weight)
    return weights


class OneStage:
    """All layers are here: micro-batches go through them one after the other."""

    def __init__(self, run: RunConfig, mesh: Mesh, part: GPT, module: nn.Module) -> None:
        self.part, self.module, self.device = part, module, mesh.device
        self.micro_batch_size, self.accumulate = (
            run.Global.micro_batch_size,
            run.Engine.accumulate_steps,
        )
        self.layout, self.stage = mesh.layout, run.Distributed.sharding.sharding_stage

    def gradients(self, batch: LocalBatch, factor: float) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, (inputs, labels) in enumerate(
            batch.micro(self.micro_batch_size, self.device), 1
        ):
            with self._synchronized(is_last=number == self.accumulate):
                loss = self.module(inputs, labels, factor)
                loss.backward()
            total += loss.detach()
        return total

    def loss(self, batch: LocalBatch) -> Tensor:
        """Without gradients, so no need of DDP."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, labels in batch.micro(self.micro_batch_size, self.device):
            total += self.part(inputs, labels)
        return total

    def _synchronized(self, is_last: bool) -> AbstractContextManager[None]:
        """When gradients travel: with the last micro-batch, or where sharding asks for it with each."""
        if self.layout.sharding > 1:
            from trainer.parallel.sharding import before_backward

            before_backward(self.module, self.stage, is_last)  # type: ignore[arg-type]
        elif self.layout.dp > 1 and not is_last:
            return self.module.no_sync()  # type: ignore[operator]
        return nullcontext()
