"""Data parallelism: the same model on every rank, whose gradients are averaged in buckets.

A bucket is a flat fp32 buffer with the gradients of some parameters. A hook adds every
micro-batch's gradient to it and frees that gradient, so only one gradient is in memory. When a
bucket is complete it is averaged over the ranks, while the backward pass continues.

Not torch's DDP, which keeps a second gradient while it accumulates, adds half-precision gradients
in half precision, and imports torch's compiler. Without collectives, the buckets are O2's fp32
gradients of a single replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from trainer.mesh import Work, wait_for
from trainer.optim import Weight
from trainer.parallel.axis_collectives import AveragedBuffer, AxisCollectives

MIB = 1 << 20


class Bucket:
    """The gradients of some parameters, one after the other in one buffer."""

    def __init__(self, weights: list[Weight], collectives: AxisCollectives | None) -> None:
        sizes = [weight.parameter.numel() for weight in weights]
        self.memory = AveragedBuffer(sum(sizes), weights[0].parameter.device, collectives)
        self.views = [
            view.view(weight.parameter.shape)
            for weight, view in zip(weights, self.memory.buffer.split(sizes))
        ]
        self.received = [0] * len(weights)  # micro-batches of this update, by parameter
        self.missing = 0  # gradients of this update that are still to come
        self.work: Work | None = None

    def begin(self, micro_batches: int) -> None:
        self.received = [0] * len(self.received)
        self.missing = len(self.received) * micro_batches

    def add(self, index: int, gradient: Tensor) -> None:
        if self.received[index]:
            self.views[index].add_(gradient)
        else:
            self.views[index].copy_(gradient)  # overwrites the previous update: saves zeroing it
        self.received[index] += 1
        self.missing -= 1

    def fill(self) -> None:
        """Set the gradients of unused parameters to zero."""
        for view, received in zip(self.views, self.received):
            if not received:
                view.zero_()

    def average(self) -> None:
        self.work = self.memory.average()

    def wait(self) -> None:
        if self.work is not None:
            wait_for(self.work)
            self.work = None


class Buckets:
    """The main gradients of all weights of a rank."""

    def __init__(
        self,
        weights: list[Weight],
        bucket_cap_mb: float,
        micro_batches: int,
        collectives: AxisCollectives | None,
    ) -> None:
        self.micro_batches, self.num_reduced = micro_batches, 0
        self.buckets: list[Bucket] = []
        # Backward passes compute gradients about in the reverse order of the parameters.
        for members in _grouped(reversed(weights), bucket_cap_mb * MIB):
            bucket = Bucket(members, collectives)
            self.buckets.append(bucket)
            for index, (weight, view) in enumerate(zip(members, bucket.views)):
                weight.main_gradient = view
                weight.parameter.register_post_accumulate_grad_hook(
                    partial(self._received, bucket, index)
                )

    def begin(self) -> None:
        """Call this before the first backward pass of an update."""
        self.num_reduced = 0
        for bucket in self.buckets:
            bucket.begin(self.micro_batches)

    def finish(self) -> None:
        """Call this after the last backward pass: reduce what is left, and wait for all ranks."""
        for bucket in self.buckets[self.num_reduced :]:
            self._reduce(bucket)
        for bucket in self.buckets:
            bucket.wait()

    @torch.no_grad()
    def _received(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        bucket.add(index, parameter.grad)
        parameter.grad = None
        # In the order of the list: all ranks have to call the same collectives in the same order,
        # even if one of them has no gradient for a parameter.
        for following in self.buckets[self.num_reduced :]:
            if following.missing:
                break
            self._reduce(following)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        self.num_reduced += 1
        bucket.fill()
        bucket.average()


def _grouped(weights: Iterable[Weight], limit: float) -> Iterator[list[Weight]]:
    """Consecutive weights: a bucket is full when its fp32 gradients reach the limit."""
    members: list[Weight] = []
    for weight in weights:
        members.append(weight)
        if 4 * sum(member.parameter.numel() for member in members) >= limit:
            yield members
            members = []
    if members:
        yield members
