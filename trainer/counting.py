"""Counts the collectives that this process calls, where torch passes them to nccl or gloo.

    with Collectives(mesh) as counted:
        ...
    counted.calls[Call("all_reduce", "mp", "bfloat16", 4096)]

Works alike in a real run and in one without other ranks (`mesh.join_alone`).
`trainer/collectives.py` computes the same numbers from the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.mesh import Mesh

# torch's names, what others call them, and the argument that is as large as the whole message
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),  # the output
    "_reduce_scatter_base_": ("reduce_scatter", 1),  # the input
    "alltoall_base_": ("reduce_scatter", 1),  # on CPUs, see `parallel/axis_collectives.py`
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


class Call(NamedTuple):
    operation: str
    axis: str  # or `tied`, `world`, `cpu`
    dtype: str
    nbytes: int


class Collectives(TorchDispatchMode):
    """Notes every call in the code that it surrounds, backward passes included."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        groups = {"world": dist.group.WORLD, "cpu": mesh.cpu_group, **mesh.groups}
        self.names = {group.group_name: name for name, group in groups.items() if group is not None}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            self._note(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        operation, position = _OPERATIONS.get(name, (name, 0))
        message = args[position]
        tensor: Tensor = message[0] if isinstance(message, list | tuple) else message
        (group,) = (
            argument
            for argument in args
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
        )
        axis = self.names[dist.ProcessGroup.unbox(group).group_name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls[Call(operation, axis, dtype, tensor.nbytes)] += 1
