"""The order in which ranks create process groups. Oracle: torch's own code, with the parts that need GPUs replaced.

With nccl and a bound device, torch creates a communicator by `ncclCommSplit` of the one of all ranks: a collective that
waits for every rank. gloo connects the members of a group, and waits for these. Here both only note that they were
called; then the notes of all ranks are run against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.distributed.layouts import FEW, LARGEST, LAYOUTS, MORE_FEW, Case, cases
from trainer import mesh
from trainer.config.sections import RunConfig
from trainer.layout import AXES, Layout, factorings

SEVERAL = [case for case in [*LAYOUTS, *FEW, *MORE_FEW, LARGEST] if case.world > 1]
# Nodes with a disk each; every one holds whole replicas, or the trainer refuses to start.
PRIVATE = [(Case(dp=4), 1), (Case(dp=4), 2), (Case(dp=2, mp=2), 2), (Case(dp=2, pp=2), 2), (LARGEST, 8)]
LARGE = Layout(dp=8, pp=16, mp=8)  # 1,024 ranks
HANDFUL = 6  # the groups of all CPUs, of four axes, and of the tied stages


class Event(NamedTuple):
    """A call that waits for other ranks, made while a group is created."""

    kind: str
    group: tuple[int, ...]
    waits_for: tuple[int, ...]
    name: str = ""  # of a group of gloo, under which its members find each other
    color: int | None = None  # of a split: ranks with the same one get a communicator, those with None get none


class Recorder:
    """One rank, with a GPU that does not exist: what torch calls while the rank joins the others."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.group = rank, world, tuple[int, ...]()
        self.events, self.creations = list[Event](), 0

    def create(
        self, size: int, rank: int, ranks: Sequence[int], backend: str, store: object, name: str, **more: Any
    ) -> Any:
        """torch's function for the creation of every group. That of all ranks comes first, with an empty list."""
        self.group, self.name, self.creations = tuple(ranks), name, self.creations + bool(ranks)
        return CREATE(size, rank, ranks, backend, store, name, **more)

    def note(self, kind: str, waits_for: Sequence[int], **more: Any) -> None:
        if self.group:
            self.events.append(Event(kind, self.group, tuple(waits_for), **more))

    def start(self, **options: Any) -> None:
        START(store=dist.HashStore(), rank=self.rank, world_size=self.world, **options)

    def gather(self, values: list[torch.Tensor], value: torch.Tensor, group: object) -> None:
        for each in values:
            each.copy_(value)
        self.note("gather", range(self.world))


class Backend:
    recorder: ClassVar[Recorder]
    supports_splitting = True

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _set_sequence_number_for_group(self) -> None: ...


class Gloo(Backend):
    def __init__(self, store: dist.PrefixStore, rank: int, size: int, timeout: object) -> None:
        self.options = SimpleNamespace()
        self.recorder.note("connect", self.recorder.group, name=self.recorder.name)


class Nccl(Backend):
    class Options:
        split_color: int

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.options = options

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.recorder.group:  # the communicator of all ranks is not split from another one
            self.recorder.note("split", range(self.recorder.world), color=self.options.split_color)

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.recorder.note("split", range(self.recorder.world))


class Group:
    """torch's ProcessGroup, as far as the creation of groups needs it."""

    BackendType = dist.ProcessGroup.BackendType
    bound_device_id: torch.device | None = None

    def __init__(self, store: object, rank: int, size: int) -> None:
        self.backends: dict[str, Backend] = {}
        self.rank, self.size = lambda: rank, lambda: size

    def _register_backend(self, device: torch.device, kind: object, backend: Backend) -> None:
        self.backends[device.type] = backend

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backends[device.type]

    def _set_default_backend(self, kind: object) -> None: ...

    _set_group_name = _set_group_desc = _set_default_backend


CREATE, START = c10d._new_process_group_helper, dist.init_process_group
STATE = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")


def recorded(layout: Layout, rank: int, per_node: int = 0) -> Recorder:
    """Join as the trainer does on a cluster of GPUs; with `per_node`, every node has its own disk."""
    recorder, run = Recorder(rank, layout.world), RunConfig()
    run = replace(run, Distributed=replace(run.Distributed, backend="nccl"))
    environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(layout.world), "MASTER_ADDR": "x"}
    environ |= {"MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(per_node or layout.world)}
    environ |= {"GPTCTL_PRIVATE_DISKS": "1"} if per_node else {}
    with pytest.MonkeyPatch.context() as patch:
        for name in STATE:
            patch.setattr(c10d, f"_{name}", {})
        patch.setattr(c10d._world, "_default_pg", None)
        for name, stub in {
            "ProcessGroup": Group,
            "ProcessGroupGloo": Gloo,
            "ProcessGroupNCCL": Nccl,
            "is_nccl_available": lambda: True,
            "_register_process_group": lambda *_: None,
            "_new_process_group_helper": recorder.create,
            "_group_count": 0,
        }.items():
            patch.setattr(c10d, name, stub, raising=False)
        patch.setattr(Backend, "recorder", recorder, raising=False)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        patch.setattr(dist, "init_process_group", recorder.start)
        patch.setattr(dist, "all_gather", recorder.gather)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(mesh, "choose_device", lambda *_: torch.device("cuda", 0))
        with mesh.join(run, layout, environ):
            pass
    return recorder


def simulate(ranks: Sequence[Recorder]) -> None:
    """Run all ranks at once: a call returns when those it waits for have made the same call."""
    positions = [0] * len(ranks)

    def heads() -> list[Event | None]:
        return [rank.events[at] if at < len(rank.events) else None for rank, at in zip(ranks, positions)]

    while any(now := heads()):
        ready = {event.waits_for for event in now if event and all(_matches(event, now[n]) for n in event.waits_for)}
        assert ready, f"deadlock: {[(n, event and (event.kind, event.group)) for n, event in enumerate(now)]}"
        for members in ready:
            if now[members[0]].kind == "split":
                check_split([now[n] for n in members])
            for n in members:
                positions[n] += 1


def _matches(event: Event, other: Event | None) -> bool:
    return bool(other) and (other.kind, other.waits_for, other.name) == (event.kind, event.waits_for, event.name)


def check_split(calls: Sequence[Event]) -> None:
    """Everybody means the same communicators: the members of a group, and only they, have its color."""
    for rank, call in enumerate(calls):
        color = calls[call.group[0]].color
        assert color is not None, f"rank {rank} splits for {call.group}, whose members do not"
        assert [n for n, other in enumerate(calls) if other.color == color] == list(call.group)
        assert call.color == (color if rank in call.group else None)


@pytest.mark.parametrize("case", cases(SEVERAL))
def test_all_ranks_create_groups_in_the_same_order(case: Case) -> None:
    simulate([recorded(case.layout, rank) for rank in range(case.world)])


@pytest.mark.parametrize(("case", "per_node"), PRIVATE)
def test_so_they_do_with_private_disks(case: Case, per_node: int) -> None:
    simulate([recorded(case.layout, rank, per_node) for rank in range(case.world)])


def test_a_rank_creates_a_handful_of_groups() -> None:
    """Of 1,024 ranks with private disks, as of 16."""
    for rank in (0, 77, 1023):
        assert recorded(LARGE, rank, 128).creations == 5
        assert recorded(LARGE._replace(dp=4, sharding=2), rank, 256).creations == HANDFUL


@pytest.mark.parametrize("world", [16, 96, pytest.param(1024, marks=pytest.mark.long)])
def test_no_two_groups_of_a_split_have_the_same_color(world: int) -> None:
    """torch hashes the ranks of a group to a color of 31 bits, and nccl would merge groups of the same color."""
    for layout in factorings(world):
        for name in [axis for axis, degree in zip(AXES, layout) if degree > 1]:
            groups = {tuple(layout.group(name, rank)) for rank in range(world)}
            assert len({c10d._process_group_color(group) for group in groups}) == len(groups)


@pytest.mark.parametrize("rank", [0, 77, 1023])
def test_one_rank_of_many_is_rehearsed(rank: int) -> None:
    """A mesh with all its groups, without the 1,023 other ranks; sums leave what they were given."""
    with mesh.join_alone(LARGE, rank) as alone:
        sizes = {name: dist.get_world_size(group) for name, group in alone.groups.items()}
        assert alone.at == LARGE.coordinates(rank)
        assert alone.summed(torch.ones(2), "mp").tolist() == [1, 1]
        assert len(alone.gather("here")) == 1024
    assert sizes == {"dp": 8, "pp": 16, "mp": 8} | ({"tied": 2} if rank != 77 else {})
    assert not dist.is_initialized()
