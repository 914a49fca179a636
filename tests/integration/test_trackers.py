"""Trainings with trackers. Oracle of the curves: metrics.jsonl; what reads them back is TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np

from tests import tracked
from tests.ranks import run, start, tiny

TRACKED = (*tiny(max_steps=12, save_steps=4, eval_freq=5, eval_iters=1, test_iters=1), "Engine.trackers=[tensorboard]")


def curves(folder: Path) -> tuple[tracked.Curves, tracked.Curves]:
    """What TensorBoard shows, and what it should: each step once, in order, as float32."""
    recorded = tracked.metric_curves(folder / "metrics.jsonl")
    expected = {name: [(step, float(np.float32(value))) for step, value in curve] for name, curve in recorded.items()}
    return tracked.event_curves(folder / "tensorboard"), expected


def trackers_of(folder: Path) -> list[int]:
    """The trackers that have not ended, by their open file of output."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            found += [int(link.parts[2])] * (os.readlink(link) == str(folder / "trackers.log"))
        except OSError:
            continue
    return found


def test_a_killed_run_is_one_curve(tmp_path: Path) -> None:
    """Killed after steps that no checkpoint has, and started again by the launcher, on two ranks."""
    ranks = start(tmp_path, *TRACKED, world=2, GPTCTL_JOB="gpt-3f9a2c", GPTCTL_ATTEMPT="0")
    ranks.wait_for("global step 6,")
    ranks.kill(signal.SIGKILL)
    ranks.wait()
    deadline = time.monotonic() + 20
    while trackers_of(tmp_path / "output"):  # the pipe of the first rank is closed
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ended = run(tmp_path, *TRACKED, world=2, GPTCTL_JOB="gpt-3f9a2c", GPTCTL_ATTEMPT="1")
    assert ended.ok, ended.text
    shown, expected = curves(tmp_path / "output")
    assert shown == expected
    assert [step for step, _ in shown["loss"]] == [*range(1, 13)]
    assert [step for step, _ in shown["valid_loss"]] == [5, 10]
    assert len(list((tmp_path / "output" / "tensorboard").iterdir())) == 2
    assert not trackers_of(tmp_path / "output")


def test_a_run_without_a_launcher_keeps_its_id(tmp_path: Path) -> None:
    """Oracles: the file after each start, and metrics.jsonl."""
    file = tmp_path / "output" / "run_id"
    ids = []
    for steps in (4, 12):
        assert run(tmp_path, *TRACKED, f"Engine.max_steps={steps}", "Engine.save_load.ckpt_dir=auto").ok
        ids.append(file.read_text())
    shown, expected = curves(tmp_path / "output")
    assert shown == expected
    assert ids[0] == ids[1]


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path) -> None:
    """A file is in the way of its folder."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "tensorboard").write_text("")
    ended = run(tmp_path, *TRACKED)
    assert ended.ok, ended.text
    assert ended.text.count("tracker tensorboard is off") == 1
    assert json.loads((tmp_path / "output" / "status.json").read_text())["state"] == "finished"
    assert len(ended.metrics()) == 12
