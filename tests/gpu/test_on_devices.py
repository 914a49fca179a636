"""What GPU clusters need, each test on a CPU over gloo (`-m long`) and on GPUs over nccl (`-m gpu`; not yet run on a GPU).

Oracles: one process for several, fp32 for half precision, the uninterrupted run for a resumed one.
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_private_disks import Nodes
from tests.distributed.test_resume import assert_equal
from tests.gpu.devices import (
    BOTH,
    attention_backends,
    be_deterministic,
    begin,
    forbid_waiting,
    in_fork,
    need,
    num_gpus,
    traced,
    train,
    without_nvml,
)
from tests.gpu.test_gpu import difference
from tests.ranks import tiny
from tests.unit.test_data import write_npz

LOSS = 5e-5  # sums on a GPU have no fixed order
HALF = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "bfloat16"}
O2 = {**HALF, "Engine.mix_precision.level": "O2"}
MP = {"Distributed.mp_degree": 2}

both = pytest.mark.parametrize("device", BOTH)


def test_cuda_is_not_started_in_the_parent() -> None:
    """Ranks are forked from here. Oracle: torch, and the files that this process has open."""
    num_gpus()
    assert not torch.cuda.is_initialized()
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [file for file in opened if file.startswith("/dev/nvidia")]


@both
def test_forked_ranks_work_without_nvml(tmp_path: Path, device: str) -> None:
    assert len(train(tmp_path, device, patch=without_nvml, max_steps=2).metrics()) == 2


@both
def test_dropout_does_not_depend_on_the_number_of_ranks(tmp_path: Path, device: str) -> None:
    """On the generators of the device."""
    keys = {"dropout": 0.1, "attention_dropout": 0.1, "micro_batch": 2, "max_steps": 5}
    alone, pair = train(tmp_path / "one", device, **keys), train(tmp_path / "two", device, 2, **keys)
    without = train(tmp_path / "without", device, max_steps=5, micro_batch=2)
    assert difference(pair.metrics(), alone.metrics()) <= LOSS
    assert difference(without.metrics(), alone.metrics()) > 1e-3


@both
@pytest.mark.parametrize("layout", [{}, MP], ids=["one", "mp2"])
def test_a_large_vocabulary(tmp_path: Path, device: str, layout: dict[str, Any]) -> None:
    """Above 32,768 the loss is computed in chunks. Oracle: one process on the CPU."""
    write_npz(tmp_path / "x", [[(7 * n * n) % 40_000 for n in range(100)] for _ in range(30)])
    keys = {
        "dataset": "GPTDataset",
        "path": "",
        "input_dir": tmp_path,
        "vocab": 40_000,
        "max_steps": 3,
        "eval_freq": -1,
    }
    keys |= {"test_iters": 0, "Data.Train.dataset.split": "[1,0,0]"}
    ended = train(tmp_path / device, device, 2 if layout else 1, **keys, **layout)
    oracle = train(tmp_path / "oracle", "cpu", **keys)
    assert difference(ended.metrics(), oracle.metrics()) <= 1e-4


@both
def test_sequence_parallel_in_half_precision(tmp_path: Path, device: str) -> None:
    keys = {"max_steps": 5, **MP, "Model.sequence_parallel": True}
    half = train(tmp_path / "half", device, 2, **keys, **O2)
    full = train(tmp_path / "full", device, max_steps=5)
    assert 0 < difference(half.metrics(), full.metrics(), relative=True) < 0.02


@both
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_with_accumulation(tmp_path: Path, device: str, level: str) -> None:
    """The norm of 64 micro-batches, added up. Oracle: fp32."""
    keys = {"global_batch": 64, "micro_batch": 1, "max_steps": 2}
    half = train(tmp_path / "half", device, **keys, **HALF, **{"Engine.mix_precision.level": level})
    full = train(tmp_path / "full", device, **keys)
    assert difference(half.metrics("grad_norm"), full.metrics("grad_norm"), relative=True) < 0.01


@both
def test_nodes_with_private_disks(tmp_path: Path, device: str) -> None:
    """Each node has whole checkpoints, and GPUs of its own."""
    need(device, 4)
    folders = [tmp_path / "a", tmp_path / "b"]
    words = [*tiny(device=device, max_steps=2), "Distributed.mp_degree=2"]
    ended = Nodes(folders, *words).wait()
    assert ended.ok, ended.text
    assert_equal(*(folder / "output" / "step_2" for folder in folders))


@both
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "exited unexpectedly: rank 1"), (signal.SIGSTOP, "rank 1 (")]
)
def test_a_killed_or_stopped_rank_is_named(tmp_path: Path, device: str, number: int, said: str) -> None:
    """The watchdog of the other rank names it, before nccl gives up."""
    ranks = begin(tmp_path, device, 2, max_steps=100_000, **{"Distributed.timeout_minutes": 0.1})
    ranks.wait_for("global step 4,", 120)
    ranks.kill(number, 1)
    ended = ranks.wait(120)
    assert ended.codes[0] == 3, ended.text
    assert said in ended.err[0]
    assert number == signal.SIGKILL or "does not respond" in ended.err[0]


@both
def test_a_resumed_run_is_bit_equal(tmp_path: Path, device: str) -> None:
    keys = {"patch": be_deterministic, "dropout": 0.1, "attention_dropout": 0.1}
    whole = train(tmp_path / "whole", device, max_steps=8, **keys)
    train(tmp_path / "parts", device, max_steps=4, **keys)
    rest = train(tmp_path / "parts", device, max_steps=8, ckpt_dir="auto", **keys)
    assert rest.metrics() == whole.metrics()
    assert_equal(*(tmp_path / name / "output" / "step_8" for name in ("whole", "parts")))


@both
def test_attention_is_fused(tmp_path: Path, device: str) -> None:
    """Oracle: the operations in torch's profile. Without a fused one, the scores of all tokens are in memory."""
    found = in_fork(tmp_path, partial(attention_backends, dtype=torch.bfloat16), device)
    print(f"\nattention on {device}: {', '.join(found)}")
    assert found
    assert "math" not in found


@both
@pytest.mark.parametrize("logging_freq", [1, 100])
def test_the_host_waits_once_per_step(tmp_path: Path, device: str, logging_freq: int) -> None:
    """On a GPU, torch raises an error at any other place; on both, reads are counted.

    A step that is logged is read at once; otherwise, on a GPU, the step before it is read.
    """
    log = tmp_path / "waits"
    train(tmp_path, device, patch=partial(forbid_waiting, 2, log), max_steps=8, logging_freq=logging_freq)
    steps = log.read_text().split("step ")[1:-1]
    assert len(steps) >= 4
    assert [step.count("read") for step in steps] == [1] * len(steps)


@both
def test_a_trace_of_some_steps(tmp_path: Path, device: str) -> None:
    train(tmp_path, device, patch=partial(traced, tmp_path, 2, 4), max_steps=6)
    trace = json.loads((tmp_path / "trace.0.json").read_text())
    names = {str(event.get("name")) for event in trace["traceEvents"]}
    assert any("addmm" in name or "gemm" in name for name in names)


SIZES = [  # name, layers, width, heads, tokens, global batch, micro-batch
    ("tiny", 2, 64, 2, 32, 8, 4),
    ("124M", 12, 768, 12, 1024, 32, 8),
    ("345M", 24, 1024, 16, 1024, 16, 4),
    ("1.3B", 24, 2048, 16, 1024, 8, 2),
]


@both
def test_a_table_of_what_is_reached(tmp_path: Path, device: str) -> None:
    """Prints tokens/s and MFU (`-s` shows it); on a CPU only for the smallest model. No limit: see test_gpu.py for that."""
    need(device)
    print(f"\n{'model':>6} {'precision':>9} {'tokens/s':>10} {'MFU':>6} {'GiB':>6}")
    for name, layers, hidden, heads, tokens, batch, micro in SIZES if device == "gpu" else SIZES[:1]:
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": tokens}
        sizes |= {"global_batch": batch, "micro_batch": micro, "max_steps": 8}
        for precision, keys in (("fp32", {}), ("bf16 O1", HALF), ("bf16 O2", O2)):
            ended = train(tmp_path / f"{name} {precision}", device, **sizes, **keys)
            print(
                table_row(name, precision, *(ended.metrics(key)[4:] for key in ("tokens_per_second", "mfu", "memory")))
            )


def table_row(name: str, precision: str, rates: list[float], shares: list[float], memory: list[float]) -> str:
    known = sorted(share for share in shares if share is not None)
    share = f"{100 * known[len(known) // 2]:.1f}%" if known else "?"
    return f"{name:>6} {precision:>9} {sorted(rates)[len(rates) // 2]:>10,.0f} {share:>6} {max(memory) / 2**30:>6.1f}"


def test_a_row_of_the_table() -> None:
    assert table_row("124M", "fp32", [1.0, 3e3, 2e3], [], [2**30]) == "  124M      fp32      2,000      ?    1.0"
