"""torch's flight recorder on CPUs. Oracles: the kernel's account of the peak memory of a rank, and the same run with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run, tiny

DEMO = {"layers": 4, "hidden": 128, "heads": 4, "seq_len": 64, "micro_batch": 12, "global_batch": 12}


def growth(folder: Path, **environ: str) -> float:
    """MB by which the first of two tensor-parallel ranks grows over 60 steps, after its first 10."""
    keys = {**DEMO, "max_steps": 70, "logging_freq": 10, "Distributed.mp_degree": 2}
    ended = run(folder, *tiny(**keys), world=2, **environ)
    assert ended.ok, ended.text
    memory = ended.metrics("memory")
    return (memory[-1] - memory[0]) / 1e6


@pytest.mark.long
def test_ranks_do_not_keep_the_stacks_of_collectives(tmp_path: Path) -> None:
    without = growth(tmp_path / "without")
    assert without < 0.3 * growth(tmp_path / "with", TORCH_FR_BUFFER_SIZE="2000")
