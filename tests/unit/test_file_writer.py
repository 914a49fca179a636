"""FileWriter on file systems with and without direct writes. Oracle: the bytes that were appended, as another program reads them."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.checkpoint
from trainer.checkpoint import Checkpoints, file_writer
from trainer.checkpoint.file_writer import UNIT, FileWriter
from trainer.checkpoint.priority import NICE
from trainer.checkpoint.tensor_files import Written, write_pieces
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.slices import whole

SLOT = 2 * UNIT
Pwrite = Callable[[int, memoryview, int], int]
pwrite: Pwrite = os.pwrite


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "SLOT", SLOT)
    monkeypatch.setattr(file_writer, "FLUSH", 3 * SLOT)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def refused(descriptor: int, data: memoryview, place: int) -> int:
    """A file system that takes the flag, and refuses the first direct write."""
    if is_direct(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")
    return pwrite(descriptor, data, place)


def short(descriptor: int, data: memoryview, place: int) -> int:
    """A file system that writes a part, even one after which direct writes are impossible."""
    return pwrite(descriptor, data[: 1 + len(data) * 2 // 3], place)


def full(descriptor: int, data: memoryview, place: int) -> int:
    if place >= 2 * SLOT:
        raise OSError(errno.ENOSPC, "No space left on device")
    return pwrite(descriptor, data, place)


def write(file: Path, parts: list[bytes]) -> int:
    with FileWriter(file) as writer:
        for part in parts:
            writer.append(memoryview(part))
        return writer.finish()


@pytest.mark.parametrize("behaviour", [pwrite, refused, short])
@pytest.mark.parametrize("size", [0, 1, UNIT - 1, UNIT, SLOT - 1, SLOT, SLOT + 1, 9 * SLOT + UNIT + 7])
def test_the_file_is_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Pwrite, size: int
) -> None:
    monkeypatch.setattr(os, "pwrite", behaviour)
    data, ends = random.Random(size).randbytes(size), sorted(random.Random(1).choices(range(size + 1), k=5))
    parts = [data[begin:end] for begin, end in zip([0, *ends], [*ends, size])]
    assert write(tmp_path / "file", parts) == size
    assert (tmp_path / "file").read_bytes() == data


def test_nothing_stays_in_the_page_cache(tmp_path: Path) -> None:
    """Oracle: the system, asked for the bytes that it has in memory."""
    with FileWriter(tmp_path / "file") as writer:
        writer.append(memoryview(bytes(8 * SLOT)))
        if not writer._is_direct:
            pytest.skip("this file system has no direct writes")
        writer.finish()
    with open(tmp_path / "file", "rb") as stream, pytest.raises(BlockingIOError):
        os.preadv(stream.fileno(), [bytearray(UNIT)], SLOT, os.RWF_NOWAIT)


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", [bytes(SLOT)] * 5)
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_text() == "old"


def test_only_threads_that_write_beside_training_have_a_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the system's priority of a thread that the writing thread starts, as it starts those that hash."""
    found = []

    def write_and_look(*arguments: Any) -> Written:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(priority).result())
        return write_pieces(*arguments)

    monkeypatch.setattr(trainer.checkpoint, "write_pieces", write_and_look)
    before = priority()
    checkpoints = Checkpoints(tmp_path, None, Mesh(Layout(), 0, 0, torch.device("cpu")), print, print)
    checkpoints.open()
    for step, is_waited_for in ((1, False), (2, True)):
        checkpoints.save(step, whole({"model.weight": torch.ones(4, 4)}), {}, is_waited_for)
        assert not checkpoints.wait()
    checkpoints.close()
    assert found == [NICE, before]
    assert priority() == before


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
