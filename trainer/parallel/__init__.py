"""Applies the axes of a layout to a model, which knows nothing of parallelism itself.

`parallelize` defines the order; each axis is implemented in the module of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.compiling import compiler
from trainer.config.sections import RunConfig, Sharding
from trainer.data import LocalBatch
from trainer.dropout import Dropout
from trainer.layout import own_chunks
from trainer.loss import Factor
from trainer.mesh import Mesh, wait_for
from trainer.model import GPT, Components, initial_value
from trainer.optim import Weight, new_weight
from trainer.parallel.axis_collectives import AxisCollectives
from trainer.parallel.data import Buckets
from trainer.parallel.tensor import Group, TensorComponents, split_dim
from trainer.precision import Precision
from trainer.slices import Holders, Slice


class Runner(Protocol):
    """Runs batches through the model."""

    def gradients(self, batch: LocalBatch, factor: Factor) -> Tensor:
        """Forward and backward pass of one update.

        Returns factor · the summed loss, or 0 on ranks that do not compute it.
        """

    def loss(self, batch: LocalBatch) -> Tensor:
        """The summed loss, or 0 on ranks that do not compute it."""


@dataclass
class Parallel:
    """The model with the layout applied to it."""

    mesh: Mesh
    parts: list[GPT]  # the layers of this rank; several parts in an interleaved pipeline
    runner: Runner
    weights: list[Weight]
    dropout: Dropout
    precision: Precision
    buckets: Buckets | None  # data parallelism and O2, both without sharding
    sequence_parallel: bool

    def train(self, mode: bool = True) -> None:
        for part in self.parts:  # autocast and pipeline stages wrap these modules
            part.train(mode)

    def gradients(self, batch: LocalBatch, factor: Factor, step: int) -> Tensor:
        """Run a batch, then sum the gradients that buckets and FSDP do not reduce."""
        self.dropout.begin(step)
        if self.buckets:
            self.buckets.begin()
        with self.precision.update():
            loss = self.runner.gradients(batch, factor)
        if self.buckets:
            self.buckets.finish()
        # Each rank of an mp group saw only its part of the sequence.
        if self.sequence_parallel:
            self._add_up([weight for weight in self.weights if not weight.is_split], "mp")
        # The first stage used the embedding for tokens, the last one for logits.
        self._add_up([weight for weight in self.weights if weight.is_tied], "tied")
        return loss

    def _add_up(self, weights: list[Weight], axis: str) -> None:
        """Sum gradients along an axis, all of them in one message."""
        if not weights or axis not in self.mesh.groups:
            return
        gradients = [weight.gradient for weight in weights]
        sums = torch.cat([gradient.flatten() for gradient in gradients])
        wait_for(AxisCollectives.along(axis, self.mesh).sum(sums))
        for gradient, total in zip(
            gradients, sums.split([gradient.numel() for gradient in gradients])
        ):
            gradient.copy_(total.view_as(gradient))


def parallelize(run: RunConfig, mesh: Mesh, precision: Precision) -> Parallel:
    """Apply the layout: pipeline split, tensor parallel, sharding or replication, schedule."""
    return with_memory(run, mesh, precision, without_memory(run, mesh, precision))


def without_memory(run: RunConfig, mesh: Mesh, precision: Precision) -> list[GPT]:
    """This rank's parts of the model, on the meta device.

    A model that is split further may be too large for one rank. A rehearsal never allocates it.
    """
    layout = mesh.layout
    interval = run.Distributed.pp_recompute_interval if layout.pp > 1 else 1
    components = _components(run, mesh)
    with torch.device("meta"):
        parts = [GPT(run.Model, layers, interval, components) for _, layers in _chunks(run, mesh)]
    for part in parts:
        precision.convert(part)
        if layout.sharding > 1:
            # Imported here, like the pipeline below: torch's part takes a second to import.
            from trainer.parallel.sharding import shard

            shard(part, run.Distributed.sharding, mesh, precision)
    return parts


def with_memory(run: RunConfig, mesh: Mesh, precision: Precision, parts: list[GPT]) -> Parallel:
    """Allocate the parts and everything that trains them."""
    layout, dropout = mesh.layout, Dropout(run, mesh)
    for part in parts:
        dropout.attach(part)
        _allocate(part, parameter_device(run.Distributed.sharding, mesh), layout.sharding > 1)
    weights = [weight for part in parts for weight in _initial_weights(part, run, mesh, precision)]
    modules = [precision.runnable(part) for part in parts]
    if layout.pp == 1:
        runner: Runner = OneStage(run, mesh, modules[0])
    else:
        from trainer.parallel.pipeline import Pipeline

        stages = [(number, module) for (number, _), module in zip(_chunks(run, mesh), modules)]
        runner = Pipeline(run, mesh, precision, stages)
    buckets = _buckets(run, mesh, precision, weights)
    sequence_parallel = run.Model.sequence_parallel
    return Parallel(mesh, parts, runner, weights, dropout, precision, buckets, sequence_parallel)


def _allocate(part: GPT, device: torch.device, is_sharded: bool) -> None:
    """Replace the parameters on the meta device by uninitialized ones."""
    if is_sharded:  # these are not plain tensors
        part.to_empty(device=device)
        return
    # Not to_empty: for a tensor like one on meta, torch imports sympy, which takes 0.3 CPU seconds.
    part._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))


def _chunks(run: RunConfig, mesh: Mesh) -> list[tuple[int, range]]:
    return own_chunks(mesh.layout, run.Model.num_layers, run.Model.virtual_pp_degree, mesh.rank)


def _buckets(
    run: RunConfig, mesh: Mesh, precision: Precision, weights: list[Weight]
) -> Buckets | None:
    """None where parameters have fp32 gradients of their own, which nobody has to average."""
    layout = mesh.layout
    # With sharding, FSDP reduces gradients in fp32, along dp too.
    if layout.sharding > 1 or not (layout.dp > 1 or precision.has_masters):
        return None
    cap, micro_batches = run.Distributed.bucket_cap_mb, run.Engine.accumulate_steps
    collectives = AxisCollectives.along("dp", mesh) if layout.dp > 1 else None
    return Buckets(weights, cap, micro_batches, collectives)


def _components(run: RunConfig, mesh: Mesh) -> Components:
    layers = compiler(run, mesh.device.type)
    if mesh.layout.mp == 1:
        return Components(layers)
    return TensorComponents(Group(mesh, run.Model.sequence_parallel, layers))


def parameter_device(sharding: Sharding, mesh: Mesh) -> torch.device:
    """The device that holds the parameters between updates."""
    is_offloaded = mesh.layout.sharding > 1 and sharding.sharding_offload
    return torch.device("cpu") if is_offloaded else mesh.device


def _initial_weights(part: GPT, run: RunConfig, mesh: Mesh, precision: Precision) -> list[Weight]:
    """Initial values and optimizer state of all parameters of a part, in global coordinates."""
    at, layout, weights = mesh.at, mesh.layout, []
    for name, parameter in part.named_parameters():
        dim, piece = split_dim(name) if layout.mp > 1 else None, own_slice(name, parameter, mesh)
        value = initial_value(name, piece, run.Model, run.Global.seed)
        weight = new_weight(name, parameter, piece, value, precision.has_masters)
        weight.is_split = dim is not None
        weight.is_tied = name == "word_embeddings.weight" and layout.pp > 1
        weight.is_copy = weight.is_tied and not part.is_first
        # Replicas along dp hold the same piece; so does the mp group if the weight is not split.
        weight.holders = Holders(layout.dp, at.dp)
        if not weight.is_split:
            weight.holders = Holders(layout.dp * layout.mp, at.dp * layout.mp + at.mp)
        weights.append(weight)
    return weights


def own_slice(name: str, parameter: Tensor, mesh: Mesh) -> Slice:
    """Which part of a parameter this rank holds."""
    layout, at = mesh.layout, mesh.at
    # FSDP reports the shape before sharding, tensor parallelism only this rank's part.
    dim, shape = split_dim(name) if layout.mp > 1 else None, list(parameter.shape)
    if dim is not None:
        shape[dim] *= layout.mp
    piece = Slice.of(tuple(shape))
    piece = piece if dim is None else piece.chunk(dim, layout.mp, at.mp)
    return piece.chunk(0, layout.sharding, at.sharding)


class OneStage:
    """Runs micro-batches one after the other, without a pipeline: this rank has all layers."""

    def __init__(self, run: RunConfig, mesh: Mesh, module: nn.Module) -> None:
        self.module, self.device = module, mesh.device
        self.micro_batch_size = run.Global.micro_batch_size
        self.accumulate = run.Engine.accumulate_steps
        self.is_sharded = mesh.layout.sharding > 1
        self.stage = run.Distributed.sharding.sharding_stage

    def gradients(self, batch: LocalBatch, factor: Factor) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, (inputs, labels) in enumerate(
            batch.micro(self.micro_batch_size, self.device), 1
        ):
            if self.is_sharded:
                from trainer.parallel.sharding import before_backward

                is_last = number == self.accumulate
                before_backward(self.module, self.stage, is_last)  # type: ignore[arg-type]
            loss = self.module(inputs, labels, factor)
            loss.backward()
            total += loss.detach()
        return total

    def loss(self, batch: LocalBatch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, labels in batch.micro(self.micro_batch_size, self.device):
            total += self.module(inputs, labels)
        return total
