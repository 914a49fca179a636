"""Reduce-scatter, for the gradients of shards and the parts of a sequence.

torch has none for gloo: it copies the message and all-reduces all of it. An all-to-all and a sum
on each rank send half of that, as a reduce-scatter should.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.mesh import Work, wait_for

# torch 2.13 renames this function, and warns about the old name.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _SumOfParts:
    """Adds up what the other ranks sent, when all of it has arrived."""

    def __init__(
        self, output: Tensor, message: Tensor, group: dist.ProcessGroup, op: object
    ) -> None:
        self.output, self.is_mean = output, op == dist.ReduceOp.AVG
        self.parts = message.new_empty((group.size(), *output.shape))
        self.work = dist.all_to_all_single(
            self.parts.view_as(message), message, group=group, async_op=True
        )

    def wait(self) -> None:
        wait_for(self.work)
        combine = torch.mean if self.is_mean else torch.sum
        combine(self.parts, 0, out=self.output)


def reduce_scatter(
    output: Tensor, message: Tensor, group: dist.ProcessGroup, op: object = dist.ReduceOp.SUM
) -> Work:
    """Start it: `output` has this rank's part of the sum, or mean, after `wait`."""
    if dist.get_backend(group) == "gloo":
        return _SumOfParts(output, message, group, op)
    work: Work = _REDUCE_SCATTER(output, message, group=group, op=op, async_op=True)
    return work


class ShardReduction:
    """For FSDP, which has its own reduce-scatter otherwise."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> Work | None:
        work = reduce_scatter(output_tensor, input_tensor, group, op)
        if async_op:
            return work
        wait_for(work)
        return None
