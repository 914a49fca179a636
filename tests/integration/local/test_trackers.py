"""A job with trackers: validated, restarted, resumed and branched, as a person does it. Oracle: the metrics of its jobs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import tracked
from tests.integration.local.test_jobs import SMALL

TRACKED = (*SMALL, "-o", "Engine.trackers=[tensorboard]", "-o", "Engine.save_load.save_steps=20")


def test_validate_and_submit_warn_of_a_missing_package(jobs) -> None:
    """A module of this name that says it is missing, in the place of one that was never installed."""
    jobs.gptctl("init")
    (jobs.folder / "hidden").mkdir()
    (jobs.folder / "hidden" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'swanlab' else find(name, *more)\n"
    )
    words = [*SMALL, "-o", "Engine.trackers=[tensorboard,swanlab]", "-o", "Global.device=cpu"]
    for verb in (["validate"], ["submit", "--dry-run"]):
        answer = jobs.gptctl(*verb, *words, PYTHONPATH=str(jobs.folder / "hidden"))
        assert answer.returncode == 0, answer.stderr
        assert answer.stderr.count("S040") == 1
        assert "not installed here: swanlab (for swanlab); the run would be trained without" in answer.stderr
        assert "hint: pip install 'gptctl[track]'" in answer.stderr
    misspelled = jobs.gptctl("validate", "-o", "Engine.trackers=[tensorbord]")
    assert misspelled.returncode == 1
    assert "C013 Engine.trackers" in misspelled.stdout + misspelled.stderr


@pytest.mark.long
def test_a_restart_and_a_resume_are_one_curve(jobs) -> None:
    """Killed twice: gptctl restarts the first, and the second ends the job, which is resumed; then a branch."""
    jobs.gptctl("init")
    first = jobs.submit(*TRACKED, "--gpus-per-node", "2", "--max-restarts", "1", "-o", "Engine.max_steps=200")
    for attempt, step in ((0, 50), (1, 90)):
        jobs.await_text(first, 0, f"global step {step},", attempt)
        os.kill(jobs.pid(first, 0, attempt), signal.SIGKILL)
    assert jobs.wait(first) == "FAILED"
    second = json.loads(jobs.gptctl("resume", first, "--wait", "--json").stdout)["job"]
    branch = json.loads(jobs.gptctl("resume", first, "--json", "-o", "Engine.max_steps=210").stdout)["job"]
    assert jobs.wait(branch) == "COMPLETED"
    ids = {
        job: json.loads((jobs.run_dir(job) / "plan.json").read_text())["first_job"] for job in (first, second, branch)
    }
    assert ids == {first: "", second: first, branch: ""}
    assert f"export GPTCTL_FIRST_JOB={first}" in (jobs.run_dir(second) / "launch.sh").read_text()

    def recorded(job: str) -> dict[int, float]:
        file: Path = jobs.run_dir(job) / "output" / "metrics.jsonl"
        return dict(tracked.metric_curves(file)["loss"])

    for job, last in ((second, 200), (branch, 210)):
        later = recorded(job)
        whole = {step: loss for step, loss in recorded(first).items() if step < min(later)} | later
        assert [*whole] == [*range(1, last + 1)]
        shown = tracked.event_curves(jobs.run_dir(job) / "output" / "tensorboard")["loss"]
        assert shown == [(step, float(np.float32(loss))) for step, loss in whole.items()]
