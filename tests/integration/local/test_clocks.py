"""Somebody sets the clock while jobs run. Oracles: what the test made happen, and the losses of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.clocks import TestClock
from tests.integration.local.test_chain import ends
from tests.integration.slurm.login import TINY

HOUR = 3600
# In the place of the trainer: it finishes the training when the test says so.
STAND_IN = """#!/bin/sh
echo "$GPTCTL_JOB" >> "$OUT/ran"
while [ ! -e "$OUT/go" ]; do sleep 0.05; done
echo '{"state": "finished", "time": '$(date +%s.%N)', "job": "'$GPTCTL_JOB'"}' > "$OUT/trained/status.json"
"""


@pytest.fixture
def clock(tmp_path) -> TestClock:
    return TestClock(tmp_path)


def test_the_latest_job_is_the_one_that_was_submitted_last(jobs, clock: TestClock) -> None:
    """Although the clock was set back by an hour between them."""
    first = jobs.quick(**clock.env)
    clock.set(-HOUR)
    second = jobs.quick(**clock.env)
    assert json.loads(jobs.gptctl("status", "--json", **clock.env).stdout)["job"] == second
    listed = json.loads(jobs.gptctl("list", "--json", **clock.env).stdout)
    assert [row["job"] for row in listed] == [first, second]


@pytest.mark.parametrize("jump", [pytest.param(HOUR, marks=pytest.mark.long), -HOUR])
def test_a_chain_knows_its_own_jobs(jobs, clock: TestClock, jump: int) -> None:
    """The first job finishes the training by a clock that was set meanwhile: nothing is left for the second."""
    (jobs.folder / "quick").write_text(STAND_IN)
    (jobs.folder / "config.yaml").write_text("Global: {device: cpu}\n")
    trained = jobs.folder / "trained"
    trained.mkdir()
    keys = [*TINY, f"Engine.save_load.output_dir={trained}"]
    options = [word for key in keys for word in ("-o", key)]
    options += ["--chain", "2", "--env", f"OUT={jobs.folder}"]
    asked = ["submit", "--json", "--cluster", "./quick.yaml", *options]
    answer = jobs.gptctl(*asked, **clock.env)
    assert answer.returncode == 0, answer.stderr
    first, second = json.loads(answer.stdout)["chain"]
    clock.set(jump)
    (jobs.folder / "go").touch()
    assert ends(jobs, [first, second]) == [("COMPLETED", ""), ("COMPLETED", "training was already complete")]
    assert (jobs.folder / "ran").read_text().split() == [first]


def losses(jobs, job: str) -> list[float]:
    rows = map(json.loads, (jobs.run_dir(job) / "output" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.long
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_training_goes_on_and_stops_as_if_nothing_had_happened(jobs, clock: TestClock, jump: int) -> None:
    """Two ranks, the watchdog and the rendezvous between them. A stop on request does not count as a failure."""
    (jobs.folder / "config.yaml").write_text("Global: {device: cpu}\n")
    keys = [*TINY, "Engine.max_steps=40", "Engine.logging_freq=1"]
    options = [word for key in keys for word in ("-o", key)]
    asked = ["--nodes", "2", "--gpus-per-node", "1", *options]
    undisturbed = jobs.submit(*asked)
    disturbed = jobs.submit(*asked, **clock.env)
    jobs.await_text(disturbed, 0, "global step 3,", seconds=90)
    clock.set(jump)
    assert [jobs.wait(job, 120) for job in (undisturbed, disturbed)] == ["COMPLETED", "COMPLETED"]
    assert losses(jobs, disturbed) == losses(jobs, undisturbed)
    clock.set(0)
    stopped = jobs.submit(*asked, "-o", "Engine.max_steps=100000", **clock.env)
    jobs.await_text(stopped, 0, "global step 3,", seconds=90)
    clock.set(jump)
    # As a person would stop it who does not know gptctl: it must find out by itself what that was.
    for file in (jobs.run_dir(stopped) / "attempt-0").glob("node.*.pid"):
        os.kill(int(file.read_text()), signal.SIGTERM)
    assert jobs.wait(stopped, 120) == "STOPPED", jobs.status(stopped)
