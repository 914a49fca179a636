"""The commands a person types: `python -m trainer` and `torchrun -m trainer`, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.ranks import tiny

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]


def start(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    env.pop("OMP_NUM_THREADS", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "output/metrics.jsonl").read_text().splitlines()]


def test_torchrun_and_python_train_alike(tmp_path: Path) -> None:
    """And the same again when the trainer is started from the outside of its repository."""
    alone = start([sys.executable, "-m", "trainer", *tiny()], tmp_path / "alone")
    two = start([*TORCHRUN, "2", "-m", "trainer", *tiny()], tmp_path / "two")
    assert alone.returncode == 0, alone.stderr
    assert two.returncode == 0, two.stderr
    differences = [abs(a - b) for a, b in zip(losses(tmp_path / "alone"), losses(tmp_path / "two"))]
    assert len(differences) == 10
    assert max(differences) <= 5e-6
    assert "Warning: " not in alone.stderr + two.stderr


def test_a_mistake_under_torchrun_is_said_and_recorded(tmp_path: Path) -> None:
    """The exit code 93 and the message reach torchrun's own report."""
    ended = start([*TORCHRUN, "2", "-m", "trainer", *tiny(path="nowhere.txt")], tmp_path)
    assert ended.returncode == 1
    assert "error: cannot read nowhere.txt: No such file or directory" in ended.stderr
    assert "hint: check Data.Train.dataset.path" in ended.stderr
    assert "exitcode  : 93" in ended.stderr


def test_a_broken_pipe_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m trainer {' '.join(tiny(max_steps=3))} | head -n 1"
    ended = start(["bash", "-c", command], tmp_path)
    assert ended.stderr == ""
