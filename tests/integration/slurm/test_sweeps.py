"""Sweeps in Slurm's queue: one array if the runs are alike, otherwise jobs that wait for each other."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess

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
    answer = sweep(login, SWEEP, "--tag", "exp=lr")
    name, jobs = answer["sweep"], [each["job"] for each in answer["jobs"]]
    assert len(jobs) == 12
    assert {row["job"] for row in login.json("list", "--tag", "exp=lr")} == set(jobs)
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


@pytest.mark.long
def test_what_the_scheduler_does_with_tasks(login: Login) -> None:
    """One task is requeued, one cancelled, then the whole array; each member has a state and logs of its own."""
    answer = sweep(login, "parameters: {Engine.max_steps: [2, 3, 4, 5]}\nparallel: 2\n", seconds=30)
    name, jobs = answer["sweep"], [each["job"] for each in answer["jobs"]]
    wait_for(login, name, lambda found: [row["state"] for row in found].count("RUNNING") == 2)
    ids = {row["job"]: row["scheduler_id"] for row in login.json("list")}
    login.lab.run("head", "scontrol", "requeue", ids[jobs[0]])
    began = login.folder / "runs" / jobs[0] / "ran"
    deadline = time.monotonic() + 150
    assert login.json("cancel", jobs[1])[0]["state"] == "CANCELLED"
    while len(began.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline, login.lab.run("head", "squeue", "--array").stdout
        time.sleep(0.5)
    assert login.run("logs", jobs[0]).returncode == 0
    login.lab.run("head", "scancel", ids[jobs[0]].partition("_")[0])
    # The requeued task came last: the others had time to complete.
    ended = wait_for(login, name, lambda found: all(row["state"] in ("CANCELLED", "COMPLETED") for row in found))
    cancelled = [row["run"] for row in ended if row["state"] == "CANCELLED"]
    assert cancelled[:2] == [0, 1]
    assert not any(len(file.read_text().splitlines()) > 2 for file in (login.folder / "runs").glob("*/ran"))
    again = login.json("sweep", "resume", name)
    assert [each["run"] for each in again["jobs"]] == cancelled
    assert {answer["state"] for answer in login.json("sweep", "cancel", name, "--now")} == {"CANCELLED"}


@pytest.mark.long
def test_an_array_that_is_too_large_for_slurm(login: Login) -> None:
    """The jobs are submitted one by one then, each waiting for the one whose place it takes."""
    shown = '"$LAB_REAL" "$@" | sed "s/^MaxArraySize.*/MaxArraySize = 3/"'
    login.lab.break_client("scontrol", f'[ "$2" = config ] || exec "$LAB_REAL" "$@"; {shown}')
    answer = sweep(login, "parameters: {Engine.max_steps: [2, 3, 4, 5]}\nparallel: 2\n")
    login.lab.restore_client("scontrol")
    ids = {row["job"]: row["scheduler_id"] for row in login.json("list")}
    assert not any("_" in ids[each["job"]] for each in answer["jobs"])
    wait_for(login, answer["sweep"], lambda found: all(row["state"] == "COMPLETED" for row in found))
    assert most_at_once(login, list(ids.values())) <= 2


@pytest.mark.long
def test_jobs_with_a_template_of_the_user_are_no_array(login: Login) -> None:
    """The script of an array would not have its lines. Oracle: what these lines write, and Slurm's ids."""
    templates = login.folder / "templates"
    templates.mkdir()
    bundled = (Path(__file__).parents[3] / "templates/jobs/job.sbatch.j2").read_text()
    (templates / "job.sbatch.j2").write_text(bundled.replace("bash\n", "bash\n#SBATCH --nice=7\n", 1))
    answer = sweep(login, "parameters: {Engine.max_steps: [2, 3, 4]}\nparallel: 2\n", "--trust")
    jobs = [each["job"] for each in answer["jobs"]]
    ids = {row["job"]: row["scheduler_id"] for row in login.json("list")}
    shown = [login.lab.run("head", "scontrol", "show", "job", ids[job]).stdout for job in jobs]
    assert not any("ArrayJobId" in text for text in shown)
    assert all("Nice=7" in text for text in shown)
    wait_for(login, answer["sweep"], lambda found: all(row["state"] == "COMPLETED" for row in found))
    assert most_at_once(login, [ids[job] for job in jobs]) <= 2


@pytest.mark.long
def test_nothing_is_left_of_an_array_that_slurm_refuses(login: Login) -> None:
    (login.folder / "sweep.yaml").write_text(SWEEP)
    profile = str(login.folder / "quick/clusters/lab.yaml")
    asked = ["--cluster", profile, "--partition", "nowhere", *(word for key in TINY for word in ("-o", key))]
    assert_nothing_left(login, login.run("sweep", "submit", "sweep.yaml", *asked), 3, "invalid partition specified")


def test_nothing_is_left_of_an_array_that_does_not_fit_on_the_disk(lab: Lab) -> None:
    """Some of its folders are complete when the disk is full; they are removed without it."""
    login = Login(lab, run_root=str(lab.small / "runs"))
    (login.folder / "sweep.yaml").write_text(SWEEP)
    profile = str(login.folder / "quick/clusters/lab.yaml")
    asked = ["--cluster", profile, *(word for key in TINY for word in ("-o", key))]
    done = login.run("sweep", "submit", "sweep.yaml", *asked)
    assert_nothing_left(login, done, 3, "No space left on device")
    assert "check run_root in the cluster profile, and the free space there" in done.stderr
    # The disk is one of the lab's own: only its machines see it.
    assert lab.run("head", "ls", "-A", str(lab.small / "runs")).stdout == ""


def assert_nothing_left(login: Login, done: CompletedProcess[str], code: int, words: str) -> None:
    """No job in Slurm, no record, no folder, no sweep; one clear error."""
    assert done.returncode == code, done.stderr
    assert "the sweep was not submitted: run 0: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert login.jobs_in_slurm() == []
    assert login.json("list", "--all") == login.json("sweep", "list") == []
    assert [file.name for file in (login.folder / "home" / "jobs").iterdir()] == ["order"]
    assert not any((login.folder / "runs").glob("*"))
