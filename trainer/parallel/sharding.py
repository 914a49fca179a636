"""Sharding: every rank keeps a shard of the training state, with FSDP2 on the (dp, sharding) ranks.

    stage   optimizer state   gradients                     parameters
    1       shard             full until the last           gathered for the whole update
                              micro-batch of an update
    2       shard             shard after each micro-batch  gathered for the whole update
    3       shard             shard after each micro-batch  gathered layer by layer, in both passes

In half precision, FSDP keeps fp32 shards and gathers them in half, so it sends half the bytes and
needs no master weights. It adds up and reduces gradients in fp32.
With dp, stages 2 and 3 reduce over the sharding ranks after each micro-batch, and over the replicas
only with the last one.
With a pipeline, gradients stay full during accumulation in every stage: torch reduces them once per
update. `sharding_offload` keeps the shards of parameters, gradients and optimizer state on the
host, in every stage; the optimizer runs there too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainer.config.sections import Sharding
from trainer.device import can_pin
from trainer.mesh import Mesh
from trainer.model import GPT
from trainer.parallel.axis_collectives import ShardGather, ShardReduction
from trainer.precision import Precision


def shard(part: GPT, config: Sharding, mesh: Mesh, precision: Precision) -> None:
    """Shard every layer, then the rest of the model: the embeddings and the final norm."""
    offload = CPUOffloadPolicy(pin_memory=can_pin()) if config.sharding_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=precision.half, reduce_dtype=torch.float32)
    states, blocks = mesh.states, list(part.layers.values())
    shared = mesh.shared_groups.get("sharding")
    reduction = ShardReduction(shared)
    # Pipelines gather all layers of a stage before they use the first one.
    gather = ShardGather(shared) if shared and mesh.layout.pp == 1 else None
    for module in (*blocks, part):  # inner modules first: FSDP leaves out what is already sharded
        fully_shard(
            module,
            mesh=states,
            reshard_after_forward=config.sharding_stage == 3,  # frees the gathered parameters
            mp_policy=policy,
            offload_policy=offload,
        )
        if mesh.device.type == "cpu":
            module.set_custom_reduce_scatter(reduction)  # type: ignore[operator]
            if gather:
                module.set_custom_all_gather(gather)  # type: ignore[operator]
    if config.broadcast_overlap:
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def before_backward(part: FSDPModule, stage: int, is_last_micro_batch: bool) -> None:
    """Configure what FSDP does with gradients and parameters after the next backward pass."""
    part.set_requires_gradient_sync(is_last_micro_batch or stage > 1)
    part.set_requires_all_reduce(is_last_micro_batch)  # over dp; the line above sets this one too
    part.set_reshard_after_backward(is_last_micro_batch or stage == 3)
    part.set_is_last_backward(is_last_micro_batch)
