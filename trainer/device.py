"""Everything that differs between GPU and CPU. All other modules treat both alike."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.malloc import keep_memory
from trainer.matrix_products import use_onednn

# Steps that may be under way on a device while the host reads the numbers of an earlier one.
READ_LAG = {"cpu": 0, "cuda": 1}


def choose_device(run: RunConfig, local_rank: int) -> torch.device:
    if run.Global.device == "cpu":
        use_onednn()
        keep_memory()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError(
            "Global.device is gpu, but torch finds no GPU",
            "use -o Global.device=cpu, or check CUDA_VISIBLE_DEVICES, the driver, "
            "and that torch is built for CUDA",
        )
    if local_rank >= count:
        raise UserError(
            f"no GPU for local rank {local_rank}: torch finds only {count}",
            f"start at most {count} ranks on this node, or make more GPUs visible",
        )
    # Set in both cases: the environment can change torch's own default.
    torch.set_float32_matmul_precision("high" if run.Engine.tf32 else "highest")
    torch.cuda.set_device(local_rank)  # otherwise libraries would also use memory of the first GPU
    return torch.device("cuda", local_rank)


_behaviour: dict[str, str] = {}  # other than its own, by type of device


def behaviour(device: torch.device) -> str:
    """The type of device whose limits and algorithms to use."""
    return _behaviour.get(device.type, device.type)


@contextmanager
def behaves_as(kind: str) -> Iterator[None]:
    """Treat the CPU as another type of device: for rehearsals, which have no GPU."""
    _behaviour["cpu"] = kind
    try:
        yield
    finally:
        del _behaviour["cpu"]


def group_options(backend: str, device: torch.device) -> dict[str, Any]:
    """Options of the process group: nccl for tensors on this rank's GPU, gloo for all others."""
    if backend == "nccl":  # gloo too, for small sums and objects on the CPU
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


def default_generator(device: torch.device) -> torch.Generator:
    return (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )


def can_pin() -> bool:
    """Whether host memory can be pinned; without a GPU, torch raises."""
    return torch.cuda.is_available()


def host_copy(tensor: Tensor) -> Tensor:
    """Empty contiguous host memory of the same shape, pinned if that makes copying faster."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def wait_for_copies(device: torch.device) -> None:
    """Wait until copies to the host that were started without waiting are complete."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostCopy:
    """A copy of a tensor to the host that the host does not wait for until it needs the values."""

    def __init__(self, tensor: Tensor) -> None:
        self.values, self._copied = host_copy(tensor), None
        self.values.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._copied = torch.cuda.Event(blocking=True)  # others can use the core meanwhile
            self._copied.record()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in pinned memory, from which transfers to a GPU run asynchronously."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def use_in_thread(device: torch.device) -> None:
    """Select this rank's GPU: new threads start on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes that this rank has used so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB
