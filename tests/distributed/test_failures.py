"""Errors of GPUs and NCCL on ranks over gloo. Oracle: which rank raised them, known to the test."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from tests.distributed.test_hang import STEP, at_step, begin, end, fail
from trainer.out_of_memory import Found, facts, find
from trainer.watchdog.network_errors import nccl_error

GPU_FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free. "
    "Process 12 has 77.95 GiB memory in use. Of the allocated memory 75.00 GiB is allocated by PyTorch"
)
HOST_FULL = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer node-7<41234>"
)
NCCL_MEMORY = "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\nLast error:\nCuda failure 2 'out of memory'"


def wrapped() -> None:
    """As torch's pipeline does it."""
    try:
        fail(torch.OutOfMemoryError(GPU_FULL))
    except torch.OutOfMemoryError as error:
        raise RuntimeError("stage 0 failed to run forward") from error


@pytest.mark.parametrize(
    "act",
    [
        partial(fail, torch.OutOfMemoryError(GPU_FULL)),
        partial(fail, MemoryError()),
        partial(fail, RuntimeError(HOST_FULL)),
        partial(fail, DistBackendError(NCCL_MEMORY)),
        wrapped,
    ],
    ids=["GPU", "Python", "host", "NCCL", "pipeline"],
)
def test_out_of_memory_is_explained_and_final(tmp_path: Path, act: Callable[[], None]) -> None:
    ended, _ = end(begin(tmp_path, patches={1: partial(at_step, act)}))
    assert ended.codes == [93, 93], ended.text
    assert re.search(rf"rank 1: error: out of memory at global step {STEP}: the host has .*, the estimate was [\d.]+ MiB\n", ended.err[1])  # fmt: skip
    (hint,) = re.findall("hint: any one of these changes is enough: (.*)", ended.err[1])
    assert hint.split("; ") == [
        "Model.use_recompute: True",
        "Global.micro_batch_size: 1",
        "Distributed.sharding.sharding_degree: 2, dp_degree: 1",
    ]
    assert f"error: rank 1 failed at global step {STEP}: out of memory" in ended.err[0]
    assert "Traceback" not in ended.text


def test_an_nccl_error_of_the_others_is_only_a_consequence(tmp_path: Path) -> None:
    """Rank 2 fails; NCCL tells the others only that a connection is lost."""

    def lose() -> None:
        while "boom" not in (tmp_path / "err.2").read_text():
            time.sleep(0.01)
        raise DistBackendError(NCCL)

    lost = partial(at_step, lose)
    patches = {0: lost, 1: lost, 2: partial(at_step, partial(fail, ValueError("boom"))), 3: lost}
    ended, _ = end(begin(tmp_path, 4, patches=patches))
    assert ended.codes == [3, 3, 1, 3], ended.text
    for rank in (0, 1, 3):
        assert f"error: rank 2 failed at global step {STEP}: ValueError: boom" in ended.err[rank]
        assert "Traceback" not in ended.err[rank]
    assert ended.status()["reason"] == f"rank 2 failed at global step {STEP}: ValueError: boom"


def test_an_nccl_error_without_another_failure_names_its_rank(tmp_path: Path) -> None:
    """Nobody else has failed: then it is what happened first. A restart may help, so the code is 3."""
    ended, _ = end(begin(tmp_path, patches={1: partial(at_step, partial(fail, DistBackendError(NCCL)))}))
    assert ended.codes == [3, 3], ended.text
    said = f"rank 1 failed at global step {STEP}: remote process exited or there was a network error"
    assert all(said in text for text in ended.err)
    assert "Connection closed by remote peer node-7<41234>" in ended.err[1]
    assert "Traceback" not in ended.text


def test_what_is_an_error_of_memory() -> None:
    assert find(ValueError("out of memory")) is None  # not of torch or a library
    assert find(RuntimeError("boom")) is None
    assert find(RuntimeError("no layer_out of memory_bank")) is None
    assert find(OSError(errno.ENOMEM, "Cannot allocate memory")) is not None  # mmap of a data set
    assert find(OSError(errno.ENOENT, "out of memory")) is None
    assert find(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")) is not None
    found = facts(torch.OutOfMemoryError(GPU_FULL), torch.device("cpu"))
    assert (found.where, found.wanted) == ("the host", int(2.5 * 2**30))
    assert facts(RuntimeError(HOST_FULL), torch.device("cpu")).wanted == 4 << 30
    assert facts(torch.OutOfMemoryError("Tried to allocate 1.2.3 GiB"), torch.device("cpu")).wanted is None
    assert isinstance(found, Found)


def test_errors_that_cause_each_other_are_looked_at_once() -> None:
    """`raise error from error` is valid Python: a rank would never end."""
    circle = RuntimeError("boom")
    circle.__cause__ = circle
    assert find(circle) is None
    assert nccl_error(circle) == ""


def test_an_nccl_error_in_one_line() -> None:
    assert nccl_error(RuntimeError("x")) == ""
    assert "\n" not in nccl_error(DistBackendError(NCCL))
    assert nccl_error(DistBackendError("")) == "NCCL failed"
