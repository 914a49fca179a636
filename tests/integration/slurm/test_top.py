"""`gptctl top` with a real Slurm: jobs that wait, run and end, and how often the controller is asked. Oracles: the counter of
the lab's clients, and Slurm's own states."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from tests.integration.slurm.login import Login, await_true
from tests.lab import Lab
from tests.terminal import FullScreen


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def test_pending_running_and_ended_jobs(login: Login) -> None:
    ended = login.submit_quick("--nodes", "1")
    login.wait(ended["job"], "COMPLETED")
    running = login.submit_quick("--nodes", "1", JOB_SECONDS="100")
    pending = login.submit_quick("--sbatch", "begin=now+100")
    login.wait(running["job"], "RUNNING")
    # Slurm tells the reason only after it has looked at the job.
    await_true(
        lambda: login.slurm("squeue", "-h", "-o", "%r", "-j", pending["scheduler_id"]).strip() == "BeginTime", 30
    )
    before = len(login.lab.calls())
    shown = json.loads(login.run("top", "--json").stdout)
    assert [name for _, name in login.lab.calls()[before:]] == ["squeue"]
    states = {job["job"]: job["state"] for job in shown["jobs"]}
    assert states == {pending["job"]: "PENDING", running["job"]: "RUNNING", ended["job"]: "COMPLETED"}
    reasons = {job["job"]: job["reason"] for job in shown["jobs"]}
    assert reasons[pending["job"]].startswith("BeginTime, expected to start 20")
    assert reasons[pending["job"]] in login.run("top", pending["job"]).stdout


@pytest.mark.long
def test_watching_asks_seldom(login: Login) -> None:
    """At most 10 questions a minute in full screen, while jobs start and end, and one is opened."""
    running = login.submit_quick("--nodes", "1", JOB_SECONDS="12")
    login.submit_quick("--sbatch", "begin=now+100")
    login.wait(running["job"], "RUNNING")
    login.env["TERM"] = "xterm-256color"
    before, began = len(login.lab.calls()), time.monotonic()
    screen = FullScreen(partial(login.start, "top"), columns=120)
    await_true(lambda: running["job"] in screen.text, 20)
    screen.press(b"\x1b[B\r")
    await_true(lambda: "log of rank 0" in screen.text, 20)
    time.sleep(20)
    screen.press(b"\x1b")
    await_true(lambda: "COMPLETED" in screen.text, 20)
    minutes = (time.monotonic() - began) / 60
    asked = [name for _, name in login.lab.calls()[before:]]
    screen.press(b"q")
    assert screen.process.wait(20) == 0
    print(f"{len(asked) / minutes:.1f} questions a minute: {sorted(set(asked))}")
    assert set(asked) == {"squeue"}
    assert 2 <= len(asked) <= 10 * minutes + 1
