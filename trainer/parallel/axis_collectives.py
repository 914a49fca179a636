"""Collectives along one axis: in shared memory if all its ranks are on this node, else by torch.

Shared memory is for CPUs only, see `shared_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.mesh import Mesh, Work, wait_for
from trainer.shared_memory import MessageMemory, SharedMemoryGroup

# torch 2.13 renames these functions, and warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
GATHERED = 3  # buffers for gathered parameters, see `ShardGather`


class AxisCollectives:
    """Starts collectives; all tensors have to be contiguous."""

    def __init__(self, group: dist.ProcessGroup, shared: SharedMemoryGroup | None) -> None:
        self.group, self.shared = group, shared

    @classmethod
    def along(cls, axis: str, mesh: Mesh) -> AxisCollectives:
        return cls(mesh.groups[axis], mesh.shared_groups.get(axis))

    def sum(self, x: Tensor) -> Work:
        """Sum in place."""
        if self.shared:
            return self.shared.sum(x)
        work: Work = dist.all_reduce(x, group=self.group, async_op=True)
        return work

    def gather(self, whole: Tensor, own: Tensor) -> Work:
        """The tensors of all ranks, one after the other."""
        if self.shared:
            return self.shared.gather(whole, own)
        work: Work = _ALL_GATHER(whole, own, group=self.group, async_op=True)
        return work

    def reduce_scatter(self, own: Tensor, message: Tensor) -> Work:
        """This rank's part of the sum."""
        if not self.shared:
            return _reduce_scatter(own, message, self.group)
        memory = self.shared.next_memory(message.nbytes)
        memory.views(message.dtype, message.numel())[self.shared.rank].copy_(message.view(-1))
        return self.shared.reduce_scatter(own, memory, is_mean=False)


class AveragedBuffer:
    """A buffer of which all ranks compute the mean, in place."""

    def __init__(
        self, numel: int, device: torch.device, collectives: AxisCollectives | None
    ) -> None:
        self.group = collectives.group if collectives else None
        self.shared = collectives.shared if collectives else None
        if self.shared:
            parts = self.shared.memory_of_each(numel * torch.float32.itemsize)
            self.parts = [part.view(torch.float32) for part in parts]
            self.buffer = self.parts[self.shared.rank]
        else:
            self.buffer = torch.zeros(numel, device=device)

    def average(self) -> Work | None:
        """None without other ranks."""
        if self.shared:
            return self.shared.mean_of_parts(self.parts)
        if self.group is None:
            return None
        work: Work = dist.all_reduce(self.buffer, dist.ReduceOp.AVG, self.group, async_op=True)
        return work


class _SumOfParts:
    """Adds up what the other ranks sent, when all of it has arrived.

    torch has no reduce-scatter for gloo: it copies the message and all-reduces all of it. An
    all-to-all and a sum on each rank send half of that, as a reduce-scatter should.
    """

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


def _reduce_scatter(
    output: Tensor, message: Tensor, group: dist.ProcessGroup, op: object = dist.ReduceOp.SUM
) -> Work:
    """Start it: `output` has this rank's part of the sum, or mean, after `wait`."""
    if dist.get_backend(group) == "gloo":
        return _SumOfParts(output, message, group, op)
    work: Work = _REDUCE_SCATTER(output, message, group=group, op=op, async_op=True)
    return work


class ShardReduction:
    """For FSDP on CPUs, which has its own reduce-scatter otherwise.

    FSDP asks for the memory of the message first, then for that of the result. It keeps the result.
    """

    def __init__(self, shared: SharedMemoryGroup | None) -> None:
        self.shared, self.is_message_next = shared, True
        self.memory: MessageMemory | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_message, self.is_message_next = self.is_message_next, not self.is_message_next
        if not self.shared or not is_message:
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = size
        self.memory = self.shared.next_memory(numel * dtype.itemsize)
        return self.memory.views(dtype, numel)[self.shared.rank]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "FSDP would not wait for it"
        if self.shared and self.memory:
            work: Work = self.shared.reduce_scatter(
                output_tensor, self.memory, op == dist.ReduceOp.AVG
            )
        else:
            work = _reduce_scatter(output_tensor, input_tensor, group, op)
        wait_for(work)


class ShardGather:
    """For FSDP on CPUs: every rank writes its shards into the same memory, and reads all of it.

    FSDP reads gather n before it begins n + 1. A collective completes only when all ranks have
    begun it, so a rank that has completed n + 1 knows that all have read n: it may write the memory
    of n for n + 2. One more buffer leaves room for a gather further ahead.
    """

    def __init__(self, shared: SharedMemoryGroup) -> None:
        self.shared, self.buffers, self.num_gathered = shared, list[Tensor](), 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        nbytes, index = numel * dtype.itemsize, self.num_gathered % GATHERED
        self.num_gathered += 1
        if index == len(self.buffers):
            self.buffers.append(self.shared.memory_of_all(nbytes))
        elif len(self.buffers[index]) < nbytes:
            self.buffers[index] = self.shared.memory_of_all(nbytes)
        return self.buffers[index][:nbytes].view(dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "its memory could be written again before it is read"
        wait_for(self.shared.begin("all_gather", lambda: None))
