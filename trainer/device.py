"""What depends on the kind of device, in one place; everything else treats a GPU and a CPU alike."""

from __future__ import annotations

import resource
from typing import Any

import torch
from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.errors import UserError


def choose_device(run: RunConfig, local_rank: int) -> torch.device:
    if run.Global.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError(
            "Global.device: gpu, but torch sees no GPU here",
            "use Global.device: cpu, or check CUDA_VISIBLE_DEVICES, the driver, and that torch is built for CUDA",
        )
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: torch sees {count} of them",
            f"start at most {count} ranks on this node, or make more devices visible",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def group_options(backend: str, device: torch.device) -> dict[str, Any]:
    """How the ranks talk: GPU tensors over nccl, bound to this rank's GPU; everything else over gloo."""
    if backend == "nccl":
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


def default_generator(device: torch.device) -> torch.Generator:
    return (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )


def can_pin() -> bool:
    """Whether memory can be pinned for copies to a GPU; torch raises where there is none."""
    return torch.cuda.is_available()


def host_copy(tensor: Tensor) -> Tensor:
    """Memory of the same shape on the host, pinned where that makes the copy faster."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The same in memory from which a copy to a GPU runs beside everything else."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def use_in_thread(device: torch.device) -> None:
    """A new thread begins on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
