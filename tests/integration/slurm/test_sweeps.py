"""Sweeps in Slurm's queue: one array if the runs are alike, otherwise jobs that wait for each other."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest

from tests.integration.slurm.login import TINY, Login
from tests.lab import Lab

SWEEP = """
method: grid
parameters:
  Optimizer.lr.max_lr: [1e-3, 3e-4, 1e-4]
  Engine.max_steps: [2, 3, 4, 5]
parallel: 3
"""


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def sweep(login: Login, text: str, *options: str, seconds: float = 1) -> dict:
    (login.folder / "sweep.yaml").write_text(text)
    quick = ("--cluster", str(login.folder / "quick/clusters/lab.yaml"), "--env", f"JOB_SECONDS={seconds}")
    overrides = [word for key in TINY for word in ("-o", key)]
    return login.json("sweep", "submit", "sweep.yaml", *quick, *options, *overrides)


def rows(login: Login, name: str) -> list[dict]:
    return sorted(login.json("sweep", "show", name)["runs"], key=lambda row: row["run"])


def wait_for(login: Login, name: str, condition, seconds: float = 200) -> list[dict]:
    deadline = time.monotonic() + seconds
    while not condition(found := rows(login, name)):
        assert time.monotonic() < deadline, str([(row["run"], row["state"], row["reason"]) for row in found])
        time.sleep(0.5)
    return found


def most_at_once(login: Login, ids: list[str]) -> int:
    """By Slurm's own clock: how many of these jobs ran at the same time."""
    events = []
    for job in ids:
        shown = login.lab.run("head", "scontrol", "show", "job", job).stdout
        start, end = (
            datetime.fromisoformat(re.search(rf"{name}=(\S+)", shown)[1]) for name in ("StartTime", "EndTime")
        )
        events += [(start, 1), (end, -1)]
    counts, running = [0], 0
    for _, change in sorted(events):
        running += change
        counts.append(running)
    return max(counts)


def test_twelve_runs_three_at_once_one_killed_and_resumed(login: Login) -> None:
    """The oracle is Slurm: one array, its limit, and what ran at the same time."""
    answer = sweep(login, SWEEP)
    name, jobs = answer["sweep"], [each["job"] for each in answer["jobs"]]
    assert len(jobs) == 12
    ids = {row["job"]: row["scheduler_id"] for row in login.json("list")}
    arrays = {ids[job].partition("_")[0] for job in jobs}
    assert len(arrays) == 1
    assert [ids[job].partition("_")[2] for job in jobs] == [str(number) for number in range(12)]
    shown = login.lab.run("head", "scontrol", "show", "job", f"{arrays.pop()}_11").stdout
    assert "ArrayTaskThrottle=3" in shown
    # One is killed while it waits: the others are not disturbed.
    login.lab.run("head", "scancel", ids[jobs[11]])
    ended = wait_for(login, name, lambda found: all(row["state"] in ("COMPLETED", "CANCELLED") for row in found))
    assert [row["state"] for row in ended] == ["COMPLETED"] * 11 + ["CANCELLED"]
    assert most_at_once(login, [ids[job] for job in jobs[:11]]) <= 3
    # Each job ran its own config, in its own folder.
    assert all((login.folder / "runs" / job / "ran").exists() for job in jobs[:11])
    again = login.json("sweep", "resume", name)
    assert [each["run"] for each in again["jobs"]] == [11]
    wait_for(login, name, lambda found: all(row["state"] == "COMPLETED" for row in found))
    assert login.json("sweep", "resume", name)["jobs"] == []


@pytest.mark.long
def test_runs_that_differ_wait_for_each_other(login: Login) -> None:
    """Two sizes of jobs cannot be one array: with two places, every job waits for the second one before it."""
    text = "parameters: {Launch.nodes: [1, 2], Engine.max_steps: [2, 3]}\nparallel: 2\n"
    name = sweep(login, text)["sweep"]
    ended = wait_for(login, name, lambda found: all(row["state"] == "COMPLETED" for row in found))
    ids = {row["job"]: row["scheduler_id"] for row in login.json("list")}
    assert len({ids[row["job"]] for row in ended}) == 4
    assert most_at_once(login, [ids[row["job"]] for row in ended]) <= 2


@pytest.mark.long
def test_cancel_of_a_sweep(login: Login) -> None:
    name = sweep(login, SWEEP, seconds=60)["sweep"]
    wait_for(login, name, lambda found: any(row["state"] == "RUNNING" for row in found))
    answers = login.json("sweep", "cancel", name, "--now")
    assert {answer["state"] for answer in answers} == {"CANCELLED"}
    assert len(answers) == 12
    assert not login.lab.run("head", "squeue", "--noheader", "--states=R,PD").stdout.strip()
