"""Counts what torch allocates: bytes by kind and phase, and floating-point operations.

    with Allocations() as counted:
        ...
    counted.peaks()[BACKWARD].total

Notes every storage that an operation returns, until the storage is freed. So it sees what torch's
own allocators see, but also works with fake tensors, which have sizes and no memory.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BUILD = "build"  # the phase before the first pass
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED = "gathered"  # by FSDP: whole parameters, and the messages from which it copies them
ACTIVATIONS = "activations"  # alive between the forward and the backward pass of a micro-batch
TEMPORARY = "temporary"  # everything else
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, TEMPORARY)

ROUNDED_TO = {"cpu": 1, "cuda": 512}  # bytes, by torch's allocators

_aten = torch.ops.aten
_WRAPPERS = ("_compile.py", "_python_dispatch.py")  # of torch, around every observer
_FLOPS = {  # torch's table has them under the names that GPUs use
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class Peak(NamedTuple):
    """The moment with most bytes."""

    total: int
    phase: str
    kinds: Mapping[str, int]


class _Block:
    """The memory of one storage. `kind` may become known after it was freed."""

    def __init__(self) -> None:
        self.size, self.kind = 0, TEMPORARY


class Allocations(TorchDispatchMode):
    """Notes every allocation in the code that it surrounds, backward passes included."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.phase, self.flops, self.rounded_to = BUILD, 0, ROUNDED_TO[device]
        self._blocks: dict[int, _Block] = {}
        self._events: list[tuple[_Block, int, str]] = []

    def __enter__(self) -> Allocations:
        # FSDP frees gathered parameters by resizing their storages, which is not an operation.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note(storage, GATHERED)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.add.Tensor and _adds_in_place(*args):
            func = _aten.add_.Tensor
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(storage_of(tensor))
        if func._overloadpacket in _FLOPS:
            self.flops += _FLOPS[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result

    def mark(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what tensors are for, also for the time before."""
        for tensor in tensors:
            if tensor is not None:
                self._note(storage_of(tensor), kind)

    def mark_rest(self, kind: str) -> None:
        """Say what everything is for that is alive and has no kind yet."""
        for block in self._blocks.values():
            if block.kind == TEMPORARY:
                block.kind = kind

    def _note(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self.rounded_to) * self.rounded_to
        if key not in self._blocks:
            self._blocks[key] = _Block()
            weakref.finalize(storage, self._freed, key)
        block = self._blocks[key]
        block.kind = kind or block.kind
        self._resized(block, size)

    def _freed(self, key: int) -> None:
        self._resized(self._blocks.pop(key), 0)

    def _resized(self, block: _Block, size: int) -> None:
        if size != block.size:
            self._events.append((block, size - block.size, self.phase))
            block.size = size

    def peaks(self) -> dict[str, Peak]:
        """The moment with most bytes of every phase."""
        found, kinds, total = dict[str, Peak](), defaultdict[str, int](int), 0
        for block, change, phase in self._events:
            total += change
            kinds[block.kind] += change
            if phase not in found or total > found[phase].total:
                found[phase] = Peak(total, phase, dict(kinds))
        return found


def _adds_in_place(first: Any, second: Any) -> bool:
    """Whether this is a sum of gradients that autograd would store in the first one.

    It does so if nothing else uses that gradient, but never while it is observed.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name == "_fn" or frame.f_code.co_filename.endswith(_WRAPPERS):
        assert frame.f_back is not None
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward" or not isinstance(second, Tensor):
        return False
    uses = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    # Of these uses, all but one of each are by torch's way to this function.
    is_alike = first.dtype == second.dtype and first.is_contiguous()
    return is_alike and first._use_count() == 4 and uses == 2


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """A DTensor's own storage is empty: this rank's part of it counts."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()
