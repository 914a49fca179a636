"""Who this process is among the others: device, rank, process groups. The only module that makes process groups."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.device import choose_device, group_options
from trainer.errors import OUT_OF_REACH, UserError
from trainer.layout import AXES, Coordinates, Layout, Machines

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PREPARATION = timedelta(hours=1)
PRIVATE_DISKS = "GPTCTL_PRIVATE_DISKS"
TORN_OVER_NODES = (
    "a checkpoint would be torn over several nodes, which do not share a folder",
    "use a folder that all nodes see, or a layout in which mp × sharding × pp divides the ranks of a node",
)
PATIENCE = 15.0  # seconds after which a rank says what it waits for
_START = "start it with torchrun, or unset RANK, WORLD_SIZE and the like"


class Pulse:
    """How far this rank is, for whoever watches it. All ranks tick alike, each before others can wait for it."""

    def __init__(self) -> None:
        self.ticks, self.since, self.where = 0, time.monotonic(), "before the first step"

    def tick(self, where: str) -> None:
        self.since, self.where = (
            time.monotonic(),
            where,
        )  # first: nobody is to see a new tick with an old time
        self.ticks += 1


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    rank: int
    local_rank: int
    device: torch.device
    cpu_group: dist.ProcessGroup | None = (
        None  # beside that of the training loop: for checkpoints, and for objects
    )
    groups: Mapping[str, dist.ProcessGroup] = field(
        default_factory=dict
    )  # of the axes with more than one rank
    pulse: Pulse = field(default_factory=Pulse)
    disks: int = 1  # more: every node has its own, and a whole copy of everything that is kept
    disk_group: dist.ProcessGroup | None = None  # the ranks that see the same disk

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
        """The ranks that hold the same layers: parameters are spread along `sharding`, and the same along `dp`."""
        axes = ("dp", "sharding") if self.layout.dp > 1 else ("sharding",)
        ranks = (
            torch.arange(self.world)
            .view(tuple(self.layout))
            .movedim(1, -2)[..., self.at.pp, self.at.mp]
        )
        ranks = ranks if self.layout.dp > 1 else ranks[0]
        groups = [self.groups[axis] for axis in axes]
        from torch.distributed.device_mesh import (
            DeviceMesh,
        )  # takes a third of a second, and few layouts need it

        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=axes)

    def total(self, *numbers: float) -> list[float]:
        """Each number, summed over all ranks."""
        return self.read(self.summed(torch.tensor(numbers, dtype=torch.float64)))

    def read(self, values: Tensor) -> list[float]:
        """Waits for the device, and so for the ranks it waits for: a place where the watchdog knows a rank to wait."""
        return values.tolist()

    def summed(self, values: Tensor, axis: str | None = None) -> Tensor:
        """The sum over the ranks along one axis, or over all of them, in the place of the values."""
        if self.world > 1 and (axis is None or axis in self.groups):
            dist.all_reduce(values, group=self.groups[axis] if axis else None)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank; for small things outside of the training loop."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def once_per_disk(self, action: Callable[[], None]) -> None:
        """Done by one rank alone. Its mistake is everybody's: no rank waits for one that is gone."""
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


def machines(environ: Mapping[str, str] = os.environ) -> Machines:
    """The world that the launcher made, from the variables it sets."""
    world = _number(environ, "WORLD_SIZE", 1)
    local = _number(environ, "LOCAL_WORLD_SIZE", world)
    rank = _number(environ, "RANK", 0)
    if rank >= world or local > world:
        message = f"RANK={rank} and LOCAL_WORLD_SIZE={local} do not fit WORLD_SIZE={world}"
        raise UserError(message, _START)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world > 1 and missing:
        raise UserError(f"WORLD_SIZE={world}, but {missing[0]} is not set", _START)
    return Machines(world // local, local) if world % local == 0 else Machines(1, world)


@contextmanager
def join(run: RunConfig, layout: Layout, environ: Mapping[str, str] = os.environ) -> Iterator[Mesh]:
    """Joins the process group and leaves it at a good end; one process alone needs none."""
    rank, local_rank = _number(environ, "RANK", 0), _number(environ, "LOCAL_RANK", 0)
    device = choose_device(run, local_rank)
    if layout.world == 1:
        yield Mesh(layout, rank, local_rank, device)
        return
    limit = 60 * run.Distributed.timeout_minutes
    timeout = timedelta(
        seconds=limit + 1.75 * answer_time(limit)
    )  # the watchdog says more, and has to come first
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    waiting = threading.Timer(
        PATIENCE, _say_waiting, [f"rank {rank} waits for {layout.world} ranks at {where}"]
    )
    waiting.daemon = True
    waiting.start()
    try:
        dist.init_process_group(timeout=timeout, **group_options(run.Distributed.backend, device))
    except (RuntimeError, ValueError) as error:
        message = f"the ranks did not meet at {where}: {str(error).splitlines()[0]}"
        raise UserError(
            message, "check that all of them were started, and that the port is free", OUT_OF_REACH
        ) from None
    finally:
        waiting.cancel()
    # Others wait here while one rank prepares data or writes its part of a checkpoint.
    cpu_group = dist.new_group(backend="gloo", timeout=max(timeout, PREPARATION), group_desc="cpu")
    _check_same(layout, cpu_group)
    disks = _disks(layout, environ)
    disk_group = _disk_group(layout.world // disks) if disks > 1 else cpu_group
    groups = _groups(layout, timeout)
    yield Mesh(
        layout, rank, local_rank, device, cpu_group, groups, disks=disks, disk_group=disk_group
    )
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


def _disks(layout: Layout, environ: Mapping[str, str]) -> int:
    """How many disks the ranks write to: one that all see, unless the launcher says that every node has its own."""
    if environ.get(PRIVATE_DISKS, "0") == "0":
        return 1
    per_node = machines(environ).per_node
    if not layout.has_whole_replicas(per_node):
        raise UserError(*TORN_OVER_NODES)
    return layout.world // per_node


def _disk_group(per_disk: int) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups(per_disk, timeout=PREPARATION, backend="gloo", group_desc="disk")
    return own


def _check_same(layout: Layout, group: dist.ProcessGroup) -> None:
    """A node with an older config would make the others wait for a message that never comes."""
    layouts: list[Any] = [None] * layout.world
    dist.all_gather_object(layouts, tuple(layout), group=group)
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            message = f"rank {rank} has the layout {Layout(*other)}, rank 0 {Layout(*layouts[0])}"
            raise UserError(message, "start all ranks with the same config")


def answer_time(limit: float) -> float:
    """The seconds in which a rank that runs answers when it is asked how far it is."""
    return min(max(1.0, limit / 2), 15.0)


def _groups(layout: Layout, timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """This rank's group along every axis, and `tied`: the two ends of its pipeline, which share the embedding.

    torch wants all ranks to make all groups, in one order. Not init_device_mesh: it leaves the timeout at 30 minutes.
    """
    members = {
        axis: {tuple(layout.group(axis, rank)) for rank in range(layout.world)} for axis in AXES
    }
    members["tied"] = {(pipeline[0], pipeline[-1]) for pipeline in members["pp"]}
    groups = {}
    for name, lists in members.items():
        ranks = sorted(map(list, lists))
        if len(set(ranks[0])) > 1:
            own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, group_desc=name)
            if own is not None:  # the middle of a pipeline holds no embedding
                groups[name] = own
    return groups


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A number of ranks, or one of them."""
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or (name.endswith("SIZE") and int(text) == 0):
        raise UserError(f"{name}={text} makes no sense", _START)
    return int(text)


def _say_waiting(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
