"""Ranks that stop, get stuck or fail. Oracles: which rank it was, known to the test; exit codes; the clock; /proc."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainer.checkpoint
import trainer.train
import trainer.watchdog
from tests.ranks import Ended, Ranks, tiny
from trainer.__main__ import main
from trainer.data import Reader
from trainer.errors import UserError
from trainer.watchdog import Answer, find_stuck_ranks
from trainer.watchdog.channel import Channel

MINUTES = 0.04
LIMIT = 60 * MINUTES  # seconds without progress
FOREVER = 600
STEP = 4  # at which the things of this file happen

Patch = Callable[[], None]


def begin(folder: Path, world: int = 2, patches: dict[int, Patch] | None = None, **keys: object) -> Ranks:
    """A run whose ranks misbehave as they are patched; `-1` stands for all of them."""

    def entry(arguments: Sequence[str]) -> int:
        for rank, patch in (patches or {}).items():
            if rank in (-1, int(os.environ["RANK"])):
                patch()
        return main(arguments)

    settings = {"max_steps": 100_000, "micro_batch": 2, "Distributed.timeout_minutes": MINUTES, **keys}
    return Ranks(tiny(**settings), world, folder, {}, entry)


def end(ranks: Ranks, seconds: float = 60) -> tuple[Ended, float]:
    """How they ended, and the seconds between the first of their ends and the last."""
    while ranks.poll() and not ranks.codes:
        time.sleep(0.005)
    began = time.monotonic()
    ended = ranks.wait(seconds)
    assert not [pid for pid in ranks.pids if Path(f"/proc/{pid}").exists()]
    return ended, time.monotonic() - began


def at_step(act: Callable[[], Any], name: str = "update_weights") -> None:
    """In this process: does something before a chapter of the training, at one step."""
    chapter = getattr(trainer.train, name)

    def patched(t: Any, *arguments: Any) -> Any:
        if t.progress.step + 1 == STEP:
            act()
        return chapter(t, *arguments)

    setattr(trainer.train, name, patched)


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("layout", "stopped"),
    [({}, 3), ({"Distributed.pp_degree": 2, "Distributed.mp_degree": 2}, 3), ({}, 0)],
    ids=["dp4", "pp2-mp2", "the rank with the store"],
)
def test_a_stopped_rank_is_named(tmp_path: Path, layout: dict[str, int], stopped: int) -> None:
    """SIGSTOP. The others say which one, keep their stacks and the kernel's state of it, and no process is left."""
    ranks = begin(tmp_path, 4, **layout)
    ranks.wait_for(f"global step {STEP},")
    ranks.kill(signal.SIGSTOP, stopped)
    began = time.monotonic()
    ended, _ = end(ranks)
    assert time.monotonic() - began < 3 * LIMIT
    assert ended.codes == [-signal.SIGKILL if rank == stopped else 3 for rank in range(4)], ended.text
    named = (
        f"error: rank {stopped} (host {os.uname().nodename}, pid {ranks.pids[stopped]}, T (stopped)) does not respond"
    )
    for rank in range(4):
        stacks = (tmp_path / f"output/logs/stacks.{rank}").read_text()
        if rank == stopped:
            assert "T (stopped)" in stacks
            assert "do_signal_stop" in stacks or not os.access("/proc/self/stack", os.R_OK)
        else:
            assert f"{named}; the other ranks wait " in ended.err[rank]
            assert "in run_steps" in stacks
            assert "Traceback" not in ended.err[rank]
    assert ended.status()["state"] == "failed"
    assert ended.status()["reason"].startswith(named.removeprefix("error: "))


def never_read(reader: Reader, *arguments: Any) -> Any:
    for number, batch in enumerate(ORIGINAL_BATCHES(reader, *arguments), 1):
        if number == STEP:
            time.sleep(FOREVER)
        yield batch


ORIGINAL_BATCHES = Reader.batches


def test_a_rank_that_gets_no_data_is_named_by_its_progress(tmp_path: Path) -> None:
    """Its own threads still run: it ends itself, first, and its stack shows the reader."""
    ranks = begin(tmp_path, patches={1: partial(setattr, Reader, "batches", never_read)})
    ended, seconds = end(ranks)
    assert ended.codes == [3, 1], ended.text
    assert seconds < LIMIT
    for text in ended.err:
        assert f"error: rank 1 (host {os.uname().nodename}, pid {ranks.pids[1]}, " in text
        assert (
            f"does not make progress reading data for global step {STEP}; the other ranks wait at global step {STEP}"
            in text
        )
    assert "in never_read" in (tmp_path / "output/logs/stacks.1").read_text()
    assert "in compute_gradients" in (tmp_path / "output/logs/stacks.0").read_text()


def test_a_rank_that_does_not_come_to_a_collective_is_named_by_its_stack(tmp_path: Path) -> None:
    """All have ticked alike; the others are at the end of their patience, and this one does not wait for anybody."""

    def stuck(*arguments: Any) -> None:
        time.sleep(FOREVER)

    ended, _ = end(begin(tmp_path, patches={1: partial(at_step, stuck, "compute_gradients")}))
    assert ended.codes == [3, 1], ended.text
    assert f"does not make progress at global step {STEP}; the other ranks wait at global step {STEP}" in ended.err[0]
    assert "error: rank 1 (" in ended.err[0]
    assert "in stuck" in (tmp_path / "output/logs/stacks.1").read_text()
    assert "in compute_gradients" in (tmp_path / "output/logs/stacks.0").read_text()


def test_a_long_step_of_all_ranks_is_no_hang(tmp_path: Path) -> None:
    """It is looked into, and the run goes on to its end without a word and without a file."""

    def announced(*arguments: Any) -> Any:
        os.write(1, b"judged\n")
        return find_stuck_ranks(*arguments)

    def patch() -> None:
        trainer.watchdog.find_stuck_ranks = announced
        at_step(partial(time.sleep, 1.5 * LIMIT))

    ended, _ = end(begin(tmp_path, patches={-1: patch}, max_steps=STEP + 2))
    assert ended.ok, ended.text
    assert "judged" in "".join(ended.out)
    assert "".join(ended.err) == ""
    assert not list(tmp_path.rglob("stacks.*"))


@pytest.mark.parametrize("failing", [2, 0])
def test_the_first_failure_is_named_everywhere(tmp_path: Path, failing: int) -> None:
    """Its traceback is in its own log alone; the others end at once, and say who it was."""
    ranks = begin(tmp_path, 4, patches={failing: partial(at_step, partial(fail, ValueError("boom")))})
    ended, seconds = end(ranks)
    named = f"rank {failing} failed at global step {STEP}: ValueError: boom"
    assert ended.codes == [1 if rank == failing else 3 for rank in range(4)], ended.text
    assert next(iter(ranks.codes)) == ranks.pids[failing]
    assert seconds < 3
    assert ended.err[failing].startswith(f"{named}\nTraceback (most recent call last):\n")
    assert ended.err[failing].endswith("ValueError: boom\n")
    for rank in set(range(4)) - {failing}:
        assert f"error: {named}\nhint: see the log of rank {failing}\n" in ended.err[rank]
        assert "Traceback" not in ended.err[rank]
    assert ended.status()["state"] == "failed"
    assert ended.status()["reason"] == named


def test_the_verdict_of_the_rank_with_the_store_arrives_before_it_exits(tmp_path: Path) -> None:
    """Ranks that receive 0.3 s late, as on busy cores: the store must not exit with what they have not received."""

    def receive_late(channel: Channel) -> Any:
        while not channel._sender.queue_len(channel._key("rank", channel.rank)):
            time.sleep(0.01)
        time.sleep(0.3)
        return ORIGINAL_NEXT_MESSAGE(channel)

    late = partial(setattr, Channel, "next_message", receive_late)
    ended, _ = end(begin(tmp_path, patches={1: late, 0: partial(at_step, partial(fail, ValueError("boom")))}))
    assert ended.codes == [1, 3], ended.text
    assert f"error: rank 0 failed at global step {STEP}: ValueError: boom\n" in ended.err[1]


ORIGINAL_NEXT_MESSAGE = Channel.next_message


def test_a_failure_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """One that all ranks are writing for ever: rank 1 fails once it has begun with its file."""
    begun = threading.Event()  # every rank has a copy of its own

    def write_forever(*arguments: Any) -> None:
        begun.set()
        time.sleep(FOREVER)

    def fail_meanwhile() -> None:
        raise ValueError("boom" if begun.wait(30) else "nothing is written")

    assert hasattr(trainer.checkpoint, "write_pieces")
    writing = partial(setattr, trainer.checkpoint, "write_pieces", write_forever)
    patches = {-1: writing, 1: partial(at_step, fail_meanwhile)}
    ended, seconds = end(begin(tmp_path, patches=patches, save_steps=STEP - 1))
    assert ended.codes == [3, 1], ended.text
    assert seconds < 3
    assert ended.status()["reason"] == f"rank 1 failed at global step {STEP}: ValueError: boom"


def test_a_mistake_that_one_rank_finds_ends_all_for_good(tmp_path: Path) -> None:
    """Started again they would end the same way: 93."""
    patches = {1: partial(at_step, partial(fail, UserError("no room", "make some")))}
    ended, _ = end(begin(tmp_path, patches=patches))
    assert ended.codes == [93, 93], ended.text
    assert "rank 1: error: no room\nhint: make some\n" in ended.err[1]
    assert f"error: rank 1 failed at global step {STEP}: no room" in ended.err[0]
    assert "Traceback" not in ended.text


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """Oracle: exit codes, and the order of exits. Rank 0 sees the process exit, and tells rank 1, which has another host name."""
    elsewhere = partial(setattr, socket, "gethostname", lambda: "elsewhere")
    ranks = begin(tmp_path, 3, patches={1: elsewhere}, global_batch=12)
    ranks.wait_for(f"global step {STEP},")
    ranks.kill(signal.SIGKILL, 2)
    ended, seconds = end(ranks)
    assert ended.codes == [3, 3, -signal.SIGKILL], ended.text
    assert next(iter(ranks.codes)) == ranks.pids[2]
    assert seconds < 2
    for rank in (0, 1):
        assert (
            f"error: another rank exited unexpectedly: rank 2 (host {os.uname().nodename}, pid {ranks.pids[2]}"
            in ended.err[rank]
        )
    assert ended.status()["reason"].startswith("another rank exited unexpectedly: rank 2")


def answers(*ticks: int, idle: float = 10, busy: Sequence[int] = ()) -> list[Answer]:
    return [Answer(rank, number, "at global step 1", idle, rank not in busy) for rank, number in enumerate(ticks)]


@pytest.mark.parametrize(
    ("told", "absent", "is_late", "culprits"),
    [
        (answers(5, 5, 4), [3], False, [3]),  # who does not answer comes first
        (answers(5, 4, 5), [], False, [1]),
        (answers(5, 4, 5, idle=1), [], False, []),  # slow, but it was seen a moment ago
        (answers(5, 4, 5, idle=1), [], True, [1]),
        (answers(5, 5, 5, busy=[2]), [], False, []),
        (answers(5, 5, 5, busy=[2]), [], True, [2]),
        (answers(5, 5, 5), [], True, []),  # all wait for each other
        (answers(5, 5, 5, busy=[0, 1, 2]), [], True, []),
        (answers(5), [], False, []),  # the others have left
    ],
)
def test_who_is_to_blame(told: list[Answer], absent: list[int], is_late: bool, culprits: list[int]) -> None:
    """The rules one by one, with a limit of 5 seconds."""
    assert find_stuck_ranks(told, absent, 5, is_late)[0] == culprits


def test_a_tick_costs_next_to_nothing() -> None:
    """Measured: 0.4 µs. The bound leaves room for a busy machine."""
    heartbeat = trainer.mesh.Heartbeat()
    began = time.process_time()
    for step in range(20_000):
        heartbeat.tick(f"at global step {step}")
    assert time.process_time() - began < 20_000 * 2e-6
