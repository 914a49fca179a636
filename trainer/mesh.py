"""This process among the others: device, rank, process groups.

The only module that creates process groups.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.device import HostCopy, choose_device, group_options
from trainer.errors import OUT_OF_REACH, UserError
from trainer.layout import Coordinates, Layout, Machines
from trainer.shared_memory import SharedMemoryGroup, join_shared_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PREPARATION = timedelta(hours=1)  # for ranks that wait while another one prepares data or saves
PRIVATE_DISKS = "GPTCTL_PRIVATE_DISKS"
TORN_OVER_NODES = (
    "a checkpoint would be split over several nodes that do not share a folder",
    "use a folder that all nodes share, or a layout in which mp × sharding × pp divides the "
    "number of ranks per node",
)
TIMEOUT = 15.0  # seconds after which a rank says that it is waiting for the others
LARGEST_MESSAGE = 1 << 28  # bytes that a rank may send in `gather`; checkpoints need 1 % of it
# The number of collectives that torch records, and its older name.
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_START = "start it with torchrun, or unset RANK, WORLD_SIZE and related variables"


class Heartbeat:
    """The progress of this rank, for the watchdog.

    All ranks tick at the same points of the training, each time before others can wait for them.
    So the rank with the fewest ticks is the one that holds up the others.
    """

    def __init__(self) -> None:
        self.ticks, self.since, self.where = 0, time.monotonic(), "before the first step"

    def tick(self, where: str) -> None:
        # The count last: another thread must not see the new count with the old time.
        self.since, self.where = time.monotonic(), where
        self.ticks += 1


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    rank: int
    local_rank: int
    device: torch.device
    # Separate from the group of the training loop: for checkpoints, and to exchange small values.
    cpu_group: dist.ProcessGroup | None = None
    # By axis, only those with more than one rank; and `tied`, see `Layout.tied`.
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    # Those of the groups that exchange tensors in this node's memory.
    shared_groups: Mapping[str, SharedMemoryGroup] = field(default_factory=dict)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    disks: int = 1  # > 1: every node has its own disk, with a full copy of everything saved

    @property
    def per_disk(self) -> int:
        return self.world // self.disks

    @property
    def rank_on_disk(self) -> int:
        return self.rank % self.per_disk

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def states(self) -> DeviceMesh:
        """The ranks that hold the same layers: sharded along `sharding`, replicated along `dp`."""
        axes = ("dp", "sharding") if self.layout.dp > 1 else ("sharding",)
        # All ranks as an array (dp, sharding, pp, mp), of which this rank's (pp, mp) plane is used.
        ranks = (
            torch.arange(self.world)
            .view(tuple(self.layout))
            .movedim(1, -2)[..., self.at.pp, self.at.mp]
        )
        ranks = ranks if self.layout.dp > 1 else ranks[0]
        groups = [self.groups[axis] for axis in axes]
        # Imported here: it takes a third of a second, and few layouts need it.
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=axes)

    def total(self, *numbers: float) -> list[float]:
        """Sum each number over all ranks."""
        # On the CPU, over gloo: float64, because sums of token counts must be exact.
        return self.read(self.summed(torch.tensor(numbers, dtype=torch.float64)))

    def read(self, values: Tensor) -> list[float]:
        """Copy values to the host, which waits for the device and for the ranks it depends on.

        A function of its own, because the watchdog recognises a waiting rank by this file.
        """
        return values.tolist()

    def read_copy(self, copy: HostCopy) -> list[float]:
        """Like `read`, for a copy that was started earlier."""
        copy.wait()
        return copy.values.tolist()

    def summed(self, values: Tensor, axis: str | None = None) -> Tensor:
        """Sum in place over all ranks, or over the ranks along one axis."""
        if self.world > 1 and (axis is None or axis in self.groups):
            dist.all_reduce(values, group=self.groups[axis] if axis else None)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Collect the values of all ranks, on all ranks, as JSON: tuples become lists.

        For small values, not in every step.
        """
        if self.world == 1:
            return [value]
        assert self.cpu_group is not None
        return gather_json(value, self.world, self.cpu_group)

    def once_per_disk(self, action: Callable[[], None]) -> None:
        """Run an action on one rank per disk. If it fails there, all ranks raise the error.

        Otherwise the other ranks would wait for a rank that has exited.
        """
        mistake = None
        try:
            if self.rank_on_disk == 0:
                action()
        except UserError as error:
            mistake = (error.message, error.hint)
        mistake = next(filter(None, self.gather(mistake)), None)
        if mistake:
            raise UserError(*mistake)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.cpu_group)


class Work(Protocol):
    """A message that is under way."""

    def wait(self) -> object: ...


def wait_for(work: Work) -> None:
    """Wait for a message that is under way. Here for the same reason as `read`."""
    work.wait()


def machines(environ: Mapping[str, str] = os.environ) -> Machines:
    """The number of nodes and ranks, from the variables that the launcher sets."""
    world = _number(environ, "WORLD_SIZE", 1)
    local = _number(environ, "LOCAL_WORLD_SIZE", world)
    rank = _number(environ, "RANK", 0)
    if rank >= world or local > world:
        message = f"RANK={rank} and LOCAL_WORLD_SIZE={local} contradict WORLD_SIZE={world}"
        raise UserError(message, _START)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world > 1 and missing:
        raise UserError(f"WORLD_SIZE={world}, but {missing[0]} is not set", _START)
    # Nodes with different numbers of ranks: treat them as one, since Machines cannot express it.
    return Machines(world // local, local) if world % local == 0 else Machines(1, world)


@contextmanager
def join(run: RunConfig, layout: Layout, environ: Mapping[str, str] = os.environ) -> Iterator[Mesh]:
    """Join the process group, and leave it after success. A single process needs no group."""
    rank, local_rank = _number(environ, "RANK", 0), _number(environ, "LOCAL_RANK", 0)
    device = choose_device(run, local_rank)
    if layout.world == 1:  # no process group, so no port and no network are needed
        yield Mesh(layout, rank, local_rank, device)
        return
    limit = 60 * run.Distributed.timeout_minutes
    # Later than the watchdog, whose message says which rank is stuck.
    timeout = timedelta(seconds=limit + 1.75 * answer_time(limit))
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    text = f"rank {rank} is waiting for all {layout.world} ranks to connect at {where}"
    waiting = threading.Timer(TIMEOUT, _print_waiting, [text])
    waiting.daemon = True
    waiting.start()
    _stop_flight_recorder(device)
    try:
        dist.init_process_group(timeout=timeout, **group_options(run.Distributed.backend, device))
    except (RuntimeError, ValueError) as error:
        message = f"the ranks could not connect at {where}: {str(error).splitlines()[0]}"
        hint = "check that all ranks were started, and that the port is free and reachable"
        raise UserError(message, hint, OUT_OF_REACH) from None
    finally:
        waiting.cancel()
    mesh = connect(layout, rank, local_rank, device, timeout, _disks(layout, environ))
    yield mesh
    for group in mesh.shared_groups.values():
        group.close()
    dist.destroy_process_group()  # not after an error: it could wait for ranks that have exited


def _stop_flight_recorder(device: torch.device) -> None:
    """On CPUs torch's flight recorder costs memory: 240 to 670 MB in each rank of the demo's model.

    It keeps the stacks of the last 2,000 collectives: little, but spread over the heap, so that
    tensors find no room between them. `tape.py` knows the rank that hangs. NCCL's timeout dumps it.
    """
    if device.type == "cpu" and not {*FLIGHT_RECORDER} & {*os.environ}:
        os.environ[FLIGHT_RECORDER[0]] = "0"


def connect(
    layout: Layout,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout: timedelta,
    disks: int = 1,
    cpu_backend: str = "gloo",
) -> Mesh:
    """Create the process groups of this rank. The default group exists already, and may be a fake.

    A rank creates only the groups that it is in: a handful, however many ranks there are. All ranks
    create them in this order, and each step divides all ranks into groups: NCCL splits the
    communicator of all ranks for it, and would wait for a rank that does not take part.
    Not init_device_mesh, because its timeout is always 30 minutes.
    """
    # Ranks wait in this one while another one prepares data or writes its part of a checkpoint,
    # which can take longer than any training step.
    cpu_group = _new_group("cpu", range(layout.world), max(timeout, PREPARATION), cpu_backend)
    _check_same(layout, cpu_group)
    members = layout.groups(rank)
    groups = {name: _new_group(name, ranks, timeout) for name, ranks in members.items()}
    shared = {name: group for name, group in groups.items() if len(members[name]) > 1}
    shared_groups = {}
    if device.type == "cpu" and cpu_backend != "fake":
        shared_groups = _shared_groups(shared, timeout)
    return Mesh(layout, rank, local_rank, device, cpu_group, shared, shared_groups, disks=disks)


def _shared_groups(
    groups: Mapping[str, dist.ProcessGroup], timeout: timedelta
) -> dict[str, SharedMemoryGroup]:
    """The groups whose ranks can share memory. Not pp: stages only send to their neighbours."""
    found = {}
    for name, group in groups.items():
        if name == "pp":
            continue
        size = group.size()
        gather = partial(gather_json, world=size, group=group)
        shared_group = join_shared_memory(group.rank(), size, gather, timeout)
        if shared_group:
            found[name] = shared_group
    return found


@contextmanager
def join_alone(layout: Layout, rank: int, timeout: timedelta = PREPARATION) -> Iterator[Mesh]:
    """The mesh of one rank without the others: its collectives return at once and move nothing."""
    if layout.world == 1:
        yield Mesh(layout, 0, 0, torch.device("cpu"))
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield connect(layout, rank, 0, torch.device("cpu"), timeout, cpu_backend="fake")
    finally:
        dist.destroy_process_group()


def _new_group(
    name: str, ranks: Sequence[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group of this rank; without a backend, it has those of the default group."""
    # Local: otherwise torch has all ranks create all groups one after the other, and those outside
    # of a gloo group would split the NCCL communicator, but its members would not.
    return dist.new_group(
        list(ranks), timeout, backend, group_desc=name, use_local_synchronization=True
    )


def _disks(layout: Layout, environ: Mapping[str, str]) -> int:
    """The number of separate disks: one, unless the launcher says that every node has its own."""
    if environ.get(PRIVATE_DISKS, "0") == "0":
        return 1
    per_node = machines(environ).per_node
    if not layout.has_whole_replicas(per_node):
        raise UserError(*TORN_OVER_NODES)
    return layout.world // per_node


def _check_same(layout: Layout, group: dist.ProcessGroup) -> None:
    """Check that all ranks have the same layout.

    With different ones, for example from an old config, they would wait for each other forever.
    """
    layouts = gather_json(list(layout), layout.world, group)
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            message = (
                f"rank {rank} has the layout {Layout(*other)}, but rank 0 has {Layout(*layouts[0])}"
            )
            raise UserError(message, "start all ranks with the same config")


def gather_json(value: Any, world: int, group: dist.ProcessGroup) -> list[Any]:
    """Collect the values of all ranks of a group.

    Not torch's all_gather_object, which unpickles what arrives: a crafted pickle runs any code.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    if min(lengths) < 0 or longest > LARGEST_MESSAGE:
        raise RuntimeError(f"a rank announced a message of {longest} bytes")
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    padded = torch.cat([text, torch.zeros(longest - len(text), dtype=torch.uint8)])
    dist.all_gather(texts, padded, group=group)
    try:
        return [json.loads(text[:n].numpy().tobytes()) for text, n in zip(texts, lengths)]
    except (ValueError, RecursionError):
        raise RuntimeError("a rank sent something that is not JSON") from None


def answer_time(limit: float) -> float:
    """The seconds that ranks have to answer the watchdog; a running rank always does."""
    return min(max(1.0, limit / 2), 15.0)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Read a rank or a number of ranks from the environment."""
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or (name.endswith("SIZE") and int(text) == 0):
        raise UserError(f"{name}={text} is invalid", _START)
    return int(text)


def _print_waiting(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
