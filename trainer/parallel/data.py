"""Data parallelism: the same model on every rank.

DDP averages gradients in buckets, overlapped with the backward pass.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.mesh import Mesh


def replicate(model: nn.Module, bucket_cap_mb: float, mesh: Mesh) -> nn.Module:
    return DistributedDataParallel(
        model,
        process_group=mesh.groups["dp"],
        device_ids=[mesh.local_rank] if mesh.device.type == "cuda" else None,  # DDP's rule for CPUs
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,  # gradients are views of the buckets: saves memory and a copy
    )
