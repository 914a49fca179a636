"""What needs GPUs: `make gpu` on a machine that has some. Layouts larger than the number of GPUs are skipped.

Not yet run on a GPU.

Oracles: one GPU for every layout, fp32 for half precision, the vendor's peak for the speed.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gptctl.traces.rank_profile import read_profile
from tests.chrome_traces import assert_is_chrome_trace
from tests.distributed.layouts import ALONE, LARGEST, LAYOUTS, Case, cases
from tests.gpu.devices import need
from tests.ranks import Ended, run, tiny

pytestmark = pytest.mark.gpu

LOSS, NORM = 5e-5, 1e-4  # sums on a GPU have no fixed order
EVALUATION = {"eval_freq": 5, "eval_iters": 2, "test_iters": 1}
MFU_FLOOR = 0.25  # of the dense half-precision peak; what a medium model reaches on one GPU without tuning


def train(folder: Path, case: Case, accumulate: int = 1, recompute: bool = False, **more: Any) -> Ended:
    need("gpu", case.world)
    keys = {**case.keys(accumulate, recompute), **EVALUATION, "device": "gpu", **more}
    ended = run(folder, *tiny(**keys), world=case.world, seconds=300)
    assert ended.ok, ended.text
    return ended


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def once() -> Ended:
        return train(tmp_path_factory.mktemp("alone"), ALONE)

    return once


def difference(here: list[float], there: list[float], relative: bool = False) -> float:
    assert len(here) == len(there) > 0
    return max(abs(a / b - 1) if relative else abs(a - b) for a, b in zip(here, there))


@pytest.mark.parametrize(("accumulate", "recompute"), [(1, False), (2, True)])
@pytest.mark.parametrize("case", cases([*LAYOUTS, LARGEST]))
def test_losses_are_those_of_one_gpu(tmp_path: Path, alone, case: Case, accumulate: int, recompute: bool) -> None:
    """The whole table, over nccl."""
    ended = train(tmp_path, case, accumulate, recompute)
    assert difference(ended.metrics(), alone().metrics()) <= LOSS
    assert difference(ended.metrics("grad_norm"), alone().metrics("grad_norm"), relative=True) <= NORM
    assert difference(ended.metrics("valid_loss"), alone().metrics("valid_loss")) <= LOSS


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases([ALONE, Case(sharding=2, stage=3), Case(mp=2), Case(pp=2)]))
def test_half_precision_stays_near_fp32(tmp_path: Path, alone, case: Case, dtype: str, level: str) -> None:
    amp = {"enable": True, "dtype": dtype, "level": level, "scale_loss": 1024}
    ended = train(tmp_path, case, **{f"Engine.mix_precision.{key}": value for key, value in amp.items()})
    assert 0 < difference(ended.metrics(), alone().metrics(), relative=True) < 0.02


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_frees_gpu_memory(tmp_path: Path, alone, stage: int) -> None:
    """The same losses, with less memory than without it."""
    case, wide = Case(sharding=2, stage=stage), {"hidden": 1024, "max_steps": 3}
    plain = train(tmp_path / "plain", case, **wide)
    offloaded = train(tmp_path / "offloaded", case, **wide, **{"Distributed.sharding.sharding_offload": True})
    assert difference(offloaded.metrics(), plain.metrics()) <= LOSS
    assert max(offloaded.metrics("memory")) < max(plain.metrics("memory"))


def test_a_checkpoint_goes_from_gpus_to_a_cpu(tmp_path: Path) -> None:
    train(tmp_path, Case(sharding=2, stage=3), max_steps=5)
    ended = train(tmp_path, ALONE, device="cpu", max_steps=10, ckpt_dir="auto")
    assert len(ended.metrics()) == 10


@pytest.mark.parametrize("case", cases([ALONE, Case(dp=2), Case(sharding=2, stage=3)]))
def test_a_profile_shows_what_the_gpus_do(tmp_path: Path, case: Case) -> None:
    """Kernels in the trace, a share of matrix products, and a snapshot of the memory with allocations in it."""
    on = {"Profiler.enable": True, "Profiler.scheduler": "[2, 4]"}
    train(tmp_path, case, max_steps=5, **on)
    folder = tmp_path / "output/profiler_log/attempt-0"
    for rank in range(case.world):
        assert_is_chrome_trace((folder / f"rank_{rank}.steps_2-3.json").read_text())
        profile = read_profile(folder / f"rank_{rank}.steps_2-3.json", rank)
        assert profile.on_gpu
        assert list(profile.steps) == [2, 3]
        assert profile.parts["matrix_products"] > 0
        assert (profile.all_communication > 0) == (case.world > 1)
        snapshot = pickle.loads((folder / f"rank_{rank}.steps_2-3.memory.pickle").read_bytes())
        assert any(snapshot["device_traces"])


def test_a_medium_model_reaches_the_floor(tmp_path: Path) -> None:
    sizes = {"layers": 12, "hidden": 1024, "heads": 16, "seq_len": 1024, "global_batch": 16, "micro_batch": 8}
    amp = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "bfloat16"}
    ended = train(tmp_path, ALONE, max_steps=20, **sizes, **amp)
    reached = [mfu for mfu in ended.metrics("mfu")[10:] if mfu is not None]
    if not reached:
        pytest.skip("the peak of this GPU is not known")
    assert sorted(reached)[len(reached) // 2] >= MFU_FLOOR
