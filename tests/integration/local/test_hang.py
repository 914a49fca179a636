"""Jobs in which a rank stops or fails, from `gptctl submit` to the answers of `gptctl`. Oracle: the rank that the test chose."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from gptctl.engine.processes import processes_of
from tests.integration.local.test_jobs import SMALL

ASKED = ["--gpus-per-node", "4", *SMALL, "-o", "Engine.max_steps=100000"]
LIMIT = 6.0  # seconds; on a busy machine, ranks take some of them to get ready
# Python runs this before any program that finds it. In the trainer's rank 2 the fourth update fails.
FAILING = """
import os, sys
if os.environ.get("RANK") == "2" and "trainer" in sys.orig_argv:
    import trainer.train
    update = trainer.train.update_weights
    def failing(t, *rest):
        if t.progress.step == 3:
            raise ValueError("boom")
        update(t, *rest)
    trainer.train.update_weights = failing
"""


def test_a_stopped_rank_is_named_and_ended(jobs) -> None:
    """Long before torchrun's own patience of 30 seconds is over."""
    jobs.gptctl("init")
    job = jobs.submit(*ASKED, "-o", f"Distributed.timeout_minutes={LIMIT / 60}")
    jobs.await_text(job, 0, "global step 5,", seconds=90)
    pid = jobs.pid(job, 3)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    named = (
        f"error: rank 3 (host {os.uname().nodename}, pid {pid}, T (stopped)) does not respond; the other ranks wait "
    )
    jobs.await_text(job, 1, named, seconds=3 * LIMIT)
    assert jobs.wait(job) == "FAILED"
    assert time.monotonic() - began < 25
    assert processes_of(str(jobs.run_dir(job))) == []
    assert jobs.status(job)["trainer"]["reason"].startswith(named.removeprefix("error: "))
    failed = jobs.gptctl("logs", job, "--failed").stdout
    assert "rank 3 failed first: SIGKILL" in failed
    assert jobs.status(job)["reason"].startswith("rank 3 (node 0): does not respond; the other ranks wait ")
    assert named in failed
    assert f"[rank 0] {named}" in jobs.gptctl("logs", job, "--errors").stdout
    logs = jobs.run_dir(job) / "logs" / "attempt-0"
    assert "rank      : 3 (local_rank: 3)" in (logs / "node.0.log").read_text().split("Root Cause")[1]
    assert all("in run_steps" in (logs / f"stacks.{rank}").read_text() for rank in range(3))
    assert "T (stopped)" in (logs / "stacks.3").read_text()


@pytest.mark.long
def test_the_time_of_a_hang_is_in_its_account(jobs) -> None:
    """Oracle: this test's own clock, from the signal that stops a rank to the end of the job."""
    limit = 16.0  # less than ten seconds without a step do not count as a hang
    jobs.gptctl("init")
    asked = [word.replace("4", "2") if word == "4" else word for word in ASKED]
    job = jobs.submit(*asked, "-o", f"Distributed.timeout_minutes={limit / 60}")
    jobs.await_text(job, 0, "global step 5,", seconds=90)
    os.kill(jobs.pid(job, 1), signal.SIGSTOP)
    began = time.monotonic()
    assert jobs.wait(job, 90) == "FAILED"
    passed = time.monotonic() - began
    (row,) = json.loads(jobs.gptctl("cost", job, "--json").stdout)["rows"]
    (attempt,) = row["attempts"]
    seconds = {name: part / attempt["gpus"] for name, part in attempt["accounts"].items()}
    assert attempt["gpus"] == 2
    assert 10 < limit - 3 < seconds["hang"] <= passed + 1
    assert sum(seconds.values()) == pytest.approx(attempt["ended"] - attempt["began"], abs=0.01)
    assert seconds["unknown"] == 0
    assert seconds["idle"] < passed - seconds["hang"] + 2


def test_the_traceback_of_the_rank_that_failed_comes_first(jobs) -> None:
    (jobs.folder / "sitecustomize.py").write_text(FAILING)
    jobs.gptctl("init")
    job = jobs.submit(*ASKED, PYTHONPATH=str(jobs.folder))
    assert jobs.wait(job, 90) == "FAILED"
    assert processes_of(str(jobs.run_dir(job))) == []
    named = "rank 2 failed at global step 4: ValueError: boom"
    assert jobs.status(job)["trainer"]["reason"] == named
    failed = jobs.gptctl("logs", job, "--failed").stdout
    assert "rank 2 failed first: exit 1" in failed
    assert jobs.status(job)["reason"] == "rank 2 (node 0): ValueError: boom"
    assert failed.index(named) < failed.index("Traceback (most recent call last):") < failed.index("then:")
    errors = jobs.gptctl("logs", job, "--errors").stdout
    assert f"[rank 2] {named}\n[rank 2] Traceback (most recent call last):\n" in errors
    for rank in (0, 1, 3):
        assert f"error: {named}" in jobs.log(job, rank)
        assert "Traceback" not in jobs.log(job, rank)
    node = (jobs.run_dir(job) / "logs" / "attempt-0" / "node.0.log").read_text()
    assert "rank      : 2 (local_rank: 2)" in node.split("Root Cause")[1]
