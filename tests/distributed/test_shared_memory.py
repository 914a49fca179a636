"""Exchanges in memory that the ranks of a node share. Oracle: the same collective of gloo, or numbers worked out by hand."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ended, Ranks, run, tiny
from trainer.layout import Layout
from trainer.mesh import Mesh, connect
from trainer.parallel.axis_collectives import AveragedBuffer, AxisCollectives, ShardGather, ShardReduction
from trainer.shared_memory import MOST_RANKS, PIECE, SWITCH, join_shared_memory
from trainer.watchdog.network_errors import LOST, TIMED_OUT

LENGTHS = (0, 1, 7, 1000, 16 * PIECE // 5)  # the last one is summed in pieces
CPU = torch.device("cpu")


def with_mesh(action: Callable[[Mesh], None], timeout: float = 60) -> Callable[[Sequence[str]], int]:
    """A program whose ranks are one dp group."""

    def act(_: Sequence[str]) -> int:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank, world = dist.get_rank(), dist.get_world_size()
        action(connect(Layout(dp=world), rank, rank, CPU, timedelta(seconds=timeout)))
        dist.destroy_process_group()
        return 0

    return act


def ranks(folder: Path, world: int, action: Callable[[Mesh], None], **environ: str) -> Ended:
    ended = Ranks([], world, folder, environ, with_mesh(action)).wait()
    assert ended.ok, ended.text
    return ended


def both(mesh: Mesh) -> tuple[AxisCollectives, AxisCollectives]:
    """The same collectives by shared memory and by gloo."""
    group = mesh.groups["dp"]
    return AxisCollectives(group, mesh.shared_groups["dp"]), AxisCollectives(group, None)


def compare_with_gloo(mesh: Mesh) -> None:
    shared, gloo = both(mesh)
    generator, size = torch.Generator().manual_seed(mesh.rank), mesh.world
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        exact = 0 if dtype == torch.float32 and size == 2 else 6e-2 if dtype == torch.bfloat16 else 1e-6
        same = partial(torch.testing.assert_close, rtol=exact, atol=exact)
        for length in LENGTHS:
            x = torch.randn(size * length, generator=generator, dtype=torch.float64).to(dtype)
            sums = [x.clone(), x.clone()]
            parts = [x.new_empty(length), x.new_empty(length)]
            wholes = [x.new_empty(size * length), x.new_empty(size * length)]
            for messages, total, part, whole in zip((shared, gloo), sums, parts, wholes):
                messages.sum(total).wait()
                messages.reduce_scatter(part, x).wait()
                messages.gather(whole, x[:length].clone()).wait()
            same(*sums)
            same(*parts)
            torch.testing.assert_close(*wholes, rtol=0, atol=0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_those_of_gloo(tmp_path: Path, world: int) -> None:
    ranks(tmp_path, world, compare_with_gloo)


def sum_many(mesh: Mesh) -> None:
    """AxisCollectives of all sizes, of which up to three are under way, by ranks that are late in turns."""
    messages, _ = both(mesh)
    for number in range(60):
        lengths = [1 + (number * 7919) % 5000, 3, 20_000 + number]
        tensors = [torch.full((length,), float(mesh.rank + number)) for length in lengths]
        if number % mesh.world == mesh.rank:
            time.sleep(0.002)
        works = [messages.sum(tensor) for tensor in tensors]
        for work in works if number % 2 else works[::-1]:
            work.wait()
        expected = float(sum(range(mesh.world)) + number * mesh.world)
        for tensor in tensors:
            assert (tensor == expected).all()


@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_used_again_only_when_all_have_read_it(tmp_path: Path, world: int) -> None:
    """Oracle: sums of constants, worked out by hand."""
    ranks(tmp_path, world, sum_many)


def average_buffers(mesh: Mesh) -> None:
    messages, gloo = both(mesh)
    buffers = [AveragedBuffer(length, CPU, messages) for length in LENGTHS]
    for update in range(3):
        values = [torch.randn(length) for length in LENGTHS]
        for buffer, value in zip(buffers, values):
            buffer.buffer.copy_(value)
        works = [buffer.average() for buffer in buffers]
        for work in works:
            assert work
            work.wait()
        for buffer, value in zip(buffers, values):
            gloo.sum(value).wait()
            torch.testing.assert_close(buffer.buffer, value / mesh.world, msg=f"update {update}")
    everywhere = [torch.empty_like(buffers[-1].buffer) for _ in range(mesh.world)]
    dist.all_gather(everywhere, buffers[-1].buffer.clone())
    assert all(torch.equal(everywhere[0], other) for other in everywhere), "replicas have the same bits"


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_are_averaged_in_place(tmp_path: Path, world: int) -> None:
    ranks(tmp_path, world, average_buffers)


def shard_like_fsdp(mesh: Mesh) -> None:
    """What FSDP does: ask for memory, fill it, start the collective, read."""
    shared, gloo = both(mesh)
    assert shared.shared
    gather, reduction, size = ShardGather(shared.shared), ShardReduction(shared.shared), mesh.world
    for length in (5, 700, 30_000, 700, 700, 5, 30_000):
        own = torch.randn(length)
        whole = gather.allocate((length * size,), dtype=torch.float32, device=CPU)
        mine = whole[mesh.rank * length :][:length]
        mine.copy_(own)
        gather(whole, mine, shared.group)
        expected = torch.empty(length * size)
        gloo.gather(expected, own).wait()
        assert torch.equal(whole, expected)
        message = reduction.allocate((length * size,), dtype=torch.float32, device=CPU)
        message.copy_(full := torch.randn(length * size))
        result = reduction.allocate((length,), dtype=torch.float32, device=CPU)
        reduction(result, message, shared.group, dist.ReduceOp.AVG)
        part = torch.empty(length)
        gloo.reduce_scatter(part, full).wait()
        torch.testing.assert_close(result, part / size)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_are_gathered_and_reduced(tmp_path: Path, world: int) -> None:
    ranks(tmp_path, world, shard_like_fsdp)


def lose_a_rank(mesh: Mesh) -> None:
    messages, _ = both(mesh)
    messages.sum(torch.ones(10)).wait()
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(2):
            messages.sum(torch.ones(10)).wait()
    except RuntimeError as error:
        Path(f"error.{mesh.rank}").write_text(f"{time.monotonic() - began} {error}")
        os._exit(0)


def test_a_killed_rank_fails_the_others_at_once(tmp_path: Path) -> None:
    """Oracle: the pattern by which the watchdog recognises a lost connection."""
    Ranks([], 3, tmp_path, {}, with_mesh(lose_a_rank)).wait()
    for rank in (0, 2):
        seconds, text = (tmp_path / f"error.{rank}").read_text().split(" ", 1)
        assert float(seconds) < 2
        assert LOST.search(text)


def wait_in_vain(mesh: Mesh) -> None:
    messages, _ = both(mesh)
    if mesh.rank == 1:
        time.sleep(3)
        os._exit(0)
    began = time.monotonic()
    try:
        messages.sum(torch.ones(10)).wait()
    except RuntimeError as error:
        Path("error").write_text(f"{time.monotonic() - began} {error}")
        os._exit(0)


def test_waiting_ends_with_the_timeout(tmp_path: Path) -> None:
    Ranks([], 2, tmp_path, {}, with_mesh(wait_in_vain, timeout=0.5)).wait()
    seconds, text = (tmp_path / "error").read_text().split(" ", 1)
    assert 0.5 <= float(seconds) < 2
    assert TIMED_OUT.search(text)


def expect_gloo(mesh: Mesh) -> None:
    assert not mesh.shared_groups
    x = torch.ones(3)
    AxisCollectives.along("dp", mesh).sum(x).wait()
    assert x.tolist() == [2, 2, 2]


def expect_shared_memory(mesh: Mesh) -> None:
    assert [*mesh.shared_groups] == ["dp"]


def test_the_switch_leaves_everything_to_gloo(tmp_path: Path) -> None:
    ranks(tmp_path, 2, expect_gloo, **{SWITCH: "0"})


@pytest.mark.parametrize("is_limited", [True, False])
def test_all_use_gloo_if_one_rank_has_a_limit(tmp_path: Path, is_limited: bool) -> None:
    """`ulimit -f` holds for this memory, too. The name of a TMPDIR may be too long for a socket."""

    def act(arguments: Sequence[str]) -> int:
        if is_limited and os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
        os.mkdir(folder := tmp_path / (os.environ["RANK"] + "x" * 100))
        tempfile.tempdir = str(folder)
        return with_mesh(expect_gloo if is_limited else expect_shared_memory)(arguments)

    ended = Ranks([], 2, tmp_path, {}, act).wait()
    assert ended.ok, ended.text


def test_ranks_of_other_machines_use_gloo() -> None:
    """Machines differ in the first of what ranks tell each other."""

    def gather(own: list[str]) -> list[list[str]]:
        return [own, ["another machine", own[1]]]

    assert join_shared_memory(0, 2, gather, timedelta(seconds=1)) is None
    assert join_shared_memory(0, MOST_RANKS + 1, gather, timedelta(seconds=1)) is None


def test_a_layout_of_all_axes_trains_alike_with_and_without(tmp_path: Path) -> None:
    """Oracle: gloo, to the last digits of fp32 sums in another order."""
    keys = {"Distributed.mp_degree": 2, "Distributed.sharding.sharding_degree": 2, "Model.sequence_parallel": True}
    losses = []
    for switch in ("0", "1"):
        folder = tmp_path / switch
        ended = run(folder, *tiny(max_steps=6, global_batch=8, micro_batch=2, **keys), world=4, **{SWITCH: switch})
        assert ended.ok, ended.text
        losses.append(ended.metrics())
    assert losses[0] == pytest.approx(losses[1], abs=5e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_that_a_pipeline_gathers_all_at_once(tmp_path: Path, stage: int) -> None:
    """Of two chunks with three layers each. Oracle: gloo."""
    keys = {
        "Distributed.pp_degree": 2,
        "Model.virtual_pp_degree": 2,
        "Distributed.sharding.sharding_degree": 2,
        "Distributed.sharding.sharding_stage": stage,
    }
    losses = []
    for switch in ("0", "1"):
        arguments = tiny(max_steps=4, layers=12, global_batch=8, micro_batch=1, **keys)
        ended = run(tmp_path / switch, *arguments, world=4, **{SWITCH: switch})
        assert ended.ok, ended.text
        losses.append(ended.metrics())
    assert losses[0] == pytest.approx(losses[1], abs=5e-6)


def average_many_buffers(mesh: Mesh) -> None:
    collectives, _ = both(mesh)
    buffers = [AveragedBuffer(3, CPU, collectives) for _ in range(400)]
    for buffer in buffers:
        buffer.buffer.fill_(float(mesh.rank))
    works = [buffer.average() for buffer in buffers]
    for work in works:
        assert work
        work.wait()
    assert all((buffer.buffer == 1.0).all() for buffer in buffers)


def test_ranks_take_what_arrives_while_they_send(tmp_path: Path) -> None:
    """A socket holds some 280 notices: with three ranks, all of them would wait to send. Oracle: the mean of 0, 1 and 2."""
    ranks(tmp_path, 3, average_many_buffers)


def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path: Path) -> None:
    def count(mesh: Mesh) -> None:
        assert mesh.shared_groups
        both(mesh)[0].sum(torch.ones(5)).wait()

    (tmp_path / "tmp").mkdir()
    ranks(tmp_path, 2, count, TMPDIR=str(tmp_path / "tmp"))
    assert not list((tmp_path / "tmp").iterdir())
