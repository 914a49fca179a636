"""Sweeps on this machine: at most some runs at once, one killed and resumed, the best one found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import save_checkpoint

SWEEP = """
parameters:
  Optimizer.lr.max_lr: [1e-3, 3e-4, 1e-4]
  Engine.max_steps: [2, 3, 4, 5]
parallel: 3
"""
# In the place of Python: writes when it ran, and a loss that depends on the config.
STAND_IN = """#!/bin/bash
date +%s.%N > "$GPTCTL_RUN_DIR/began"
while [ -e {folder}/hold ]; do sleep 0.1; done
sleep 0.3
mkdir -p "$GPTCTL_RUN_DIR/output"
steps=$(sed -n 's/.*"max_steps": \\([0-9]*\\),.*/\\1/p' "$GPTCTL_RUN_DIR/config.json" | head -1)
echo "{{\\"event\\": \\"train\\", \\"step\\": $steps, \\"loss\\": $steps.5, \\"attempt\\": 0}}" > "$GPTCTL_RUN_DIR/output/metrics.jsonl"
date +%s.%N > "$GPTCTL_RUN_DIR/ended"
"""


def make(jobs, text: str = SWEEP) -> None:
    jobs.gptctl("init")
    (jobs.folder / "quick").write_text(STAND_IN.format(folder=jobs.folder))
    (jobs.folder / "sweep.yaml").write_text(text)


def submit(jobs, *options: str) -> dict:
    answer = jobs.gptctl("sweep", "submit", "sweep.yaml", "--cluster", "./quick.yaml", "--json", *options)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def shown(jobs, name: str) -> dict:
    return json.loads(jobs.gptctl("sweep", "show", name, "--json").stdout)


def wait(jobs, name: str, condition, seconds: float = 60) -> dict:
    deadline = time.monotonic() + seconds
    while True:
        found = shown(jobs, name)
        if condition([row["state"] for row in found["runs"]]):
            return found
        assert time.monotonic() < deadline, str(found)
        time.sleep(0.2)


def most_at_once(jobs, ids: list[str]) -> int:
    events = [
        (float((jobs.run_dir(job) / file).read_text()), change)
        for job in ids
        for file, change in (("began", 1), ("ended", -1))
    ]
    return max(sum(change for _, change in sorted(events)[: n + 1]) for n in range(len(events)))


def test_twelve_runs_three_at_once_one_killed_and_resumed(jobs) -> None:
    """The oracle is the clock of the jobs themselves."""
    make(jobs)
    (jobs.folder / "hold").touch()
    answer = submit(jobs)
    name, ids = answer["sweep"], [each["job"] for each in answer["jobs"]]
    wait(jobs, name, lambda states: states.count("RUNNING") == 3 and states.count("PENDING") == 9)
    # One that waits and one that runs are killed: their places are free at once.
    assert jobs.gptctl("cancel", "--now", ids[0], ids[11]).returncode == 0
    (jobs.folder / "hold").unlink()
    ended = wait(jobs, name, lambda states: states.count("COMPLETED") == 10)
    assert most_at_once(jobs, ids[1:11]) <= 3
    best = ended["best"]
    assert (best["value"], best["values"]["Engine.max_steps"]) == (2.5, "2")
    assert [row["value"] for row in ended["runs"][:10]] == sorted(row["value"] for row in ended["runs"][:10])
    again = json.loads(jobs.gptctl("sweep", "resume", name, "--json").stdout)
    assert [each["run"] for each in again["jobs"]] == [0, 11]
    wait(jobs, name, lambda states: states.count("COMPLETED") == 12)
    table = jobs.gptctl("sweep", "show", name)
    assert "best loss: 2.5" in table.stderr
    assert "sweep" in jobs.gptctl("sweep", "list").stdout


def test_a_sweep_stays_as_it_was_submitted(jobs) -> None:
    """Runs without a job, and a removed one, are submitted later from another folder: the config was edited meanwhile."""
    make(jobs, "parameters: {Engine.max_steps: [2, 3, 4]}\n")
    (jobs.folder / "hold").touch()
    answer = submit(jobs, "--env", "A=1e3")
    name, ids = answer["sweep"], [each["job"] for each in answer["jobs"]]
    assert jobs.gptctl("cancel", "--now", *ids).returncode == 0
    (jobs.folder / "hold").unlink()
    assert jobs.gptctl("rm", "--yes", ids[0]).returncode == 0
    # As if gptctl had been killed before it submitted the second run.
    (jobs.folder / f"home/.local/state/gptctl/jobs/{ids[1]}.json").unlink()
    (jobs.folder / "config.yaml").write_text("Engine: {max_steps: broken}\n")
    (jobs.folder / "elsewhere").mkdir()
    # The third one is resumed by hand: it is still the same run.
    save_checkpoint(jobs.run_dir(ids[2]) / "output", 1)
    third = json.loads(jobs.gptctl("resume", ids[2], "--json").stdout)["job"]
    again = jobs.gptctl("sweep", "resume", name, "--json", cwd=jobs.folder / "elsewhere")
    assert [each["run"] for each in json.loads(again.stdout)["jobs"]] == [0, 1], again.stderr
    ended = wait(jobs, name, lambda states: states.count("COMPLETED") == 3)
    assert {row["run"]: row["value"] for row in ended["runs"]} == {0: 2.5, 1: 3.5, 2: 4.5}
    assert third in [row["job"] for row in ended["runs"]]
    frozen = json.loads((jobs.run_dir(ended["runs"][0]["job"]) / "plan.json").read_text())
    assert frozen["env"]["A"] == "1e3"


@pytest.mark.long
def test_a_killed_submit_is_completed_by_resume(jobs) -> None:
    """gptctl is killed while it submits: every run is submitted once in the end."""
    make(jobs)
    command = [
        str(Path(sys.executable).with_name("gptctl")),
        "sweep",
        "submit",
        "sweep.yaml",
        "--cluster",
        "./quick.yaml",
    ]
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    process = subprocess.Popen(command, cwd=jobs.folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list((jobs.folder / "runs").glob("*/claim.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (sweep,) = json.loads(jobs.gptctl("sweep", "list", "--json").stdout)
    assert jobs.gptctl("sweep", "resume", sweep["sweep"]).returncode == 0
    ended = wait(jobs, sweep["sweep"], lambda states: states.count("COMPLETED") == 12)
    ids = {row["job"] for row in ended["runs"]}
    assert len(ids) == 12
    assert ids == {row["job"] for row in json.loads(jobs.gptctl("list", "--all", "--json").stdout)}


def test_refused_before_anything_is_submitted(jobs) -> None:
    make(jobs, "parameters: {Distributed.mp_degree: [1, 2, 3], Global.micro_batch_size: [12, 0]}\n")
    answer = jobs.gptctl("sweep", "submit", "sweep.yaml", "--cluster", "./quick.yaml", "--nodes", "2")
    assert answer.returncode == 1
    assert "runs of 6 cannot start" in answer.stderr
    assert "L002" in answer.stderr
    assert "C012" in answer.stderr
    assert json.loads(jobs.gptctl("list", "--json").stdout) == []
    assert json.loads(jobs.gptctl("sweep", "list", "--json").stdout) == []
    shown = jobs.gptctl(
        "sweep",
        "submit",
        "sweep.yaml",
        "--cluster",
        "./quick.yaml",
        "--nodes",
        "2",
        "--skip-invalid",
        "--dry-run",
        "--json",
    )
    assert [run["Distributed.mp_degree"] for run in json.loads(shown.stdout)] == ["1", "2"]
    make(jobs, "parameters: {Optimizr.name: [1, 2]}\n")
    assert jobs.gptctl("sweep", "submit", "sweep.yaml").stderr.count("C010") == 2
    # What only the comparison of runs shows, and a key whose value is a mapping.
    for text, code in [
        ("parameters: {Optimizer.lr.max_lr: [1e-3, 0.001]}", "W001"),
        ("parameters: {Optimizer.lr.max_lr: [1e-3, 1e-4]}\nconfig: shared.yaml", "W003"),
        ("parameters: {a.b: [1, 2]}", "C010"),
    ]:
        (jobs.folder / "shared.yaml").write_text("_base_: config.yaml\nEngine: {save_load: {output_dir: out}}\n")
        (jobs.folder / "sweep.yaml").write_text(text)
        refused = jobs.gptctl("sweep", "submit", "sweep.yaml", "--cluster", "./quick.yaml")
        assert refused.returncode == 1
        assert code in refused.stderr
    assert json.loads(jobs.gptctl("sweep", "list", "--json").stdout) == []
    for arguments, words in [
        (["submit", "missing.yaml"], "cannot read missing.yaml"),
        (["show"], "there are no sweeps yet"),
        (["resume", "x"], "there are no sweeps yet"),
        (["cancel"], "SWEEP"),
    ]:
        refused = jobs.gptctl("sweep", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr


def test_no_sweep_is_left_if_the_first_run_is_refused(jobs) -> None:
    """What only the submission finds: all runs need GPUs, and this machine has none. Oracle: the lists, and the disk."""
    make(jobs, "parameters: {Engine.max_steps: [2, 3]}\n")
    refused = jobs.gptctl(
        "sweep", "submit", "sweep.yaml", "--cluster", "./quick.yaml", "-o", "Global.device=gpu", CUDA_VISIBLE_DEVICES=""
    )
    assert refused.returncode == 1
    assert "S016" in refused.stderr
    assert refused.stderr.endswith("error: the sweep was not submitted\n")
    assert "sweep resume" not in refused.stderr
    assert json.loads(jobs.gptctl("sweep", "list", "--json").stdout) == []
    assert jobs.left_over() == []
    assert [file.name for file in (jobs.folder / "home/.local/state/gptctl/sweeps").iterdir()] == ["order"]


@pytest.mark.long
def test_places_after_a_resume(jobs) -> None:
    """A run that is continued and one that starts again wait for a place, too. Oracles: what they note, and the clock."""
    make(jobs, "parameters: {Engine.max_steps: [2, 3, 4, 5]}\nparallel: 2\n")
    (jobs.folder / "hold").touch()
    answer = submit(jobs)
    name, ids = answer["sweep"], [each["job"] for each in answer["jobs"]]
    assert jobs.gptctl("cancel", "--now", ids[0], ids[3]).returncode == 0
    assert jobs.gptctl("rm", "--yes", ids[3]).returncode == 0
    save_checkpoint(jobs.run_dir(ids[0]) / "output", 1)
    wait(jobs, name, lambda states: states.count("RUNNING") == 2)
    again = json.loads(jobs.gptctl("sweep", "resume", name, "--json").stdout)["jobs"]
    assert [each["run"] for each in again] == [0, 3]
    new = [each["job"] for each in again]
    deadline = time.monotonic() + 20
    while not all(f"(group {name}: 2 at once)" in jobs.waits_for(job) for job in new):
        assert time.monotonic() < deadline, [jobs.waits_for(job) for job in new]
        time.sleep(0.05)
    (jobs.folder / "hold").unlink()
    assert jobs.ended(*ids[1:3], *new) == ["COMPLETED"] * 4
    assert most_at_once(jobs, [*ids[1:3], *new]) == 2
