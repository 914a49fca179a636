"""shell, stacks and forward in an allocation of Slurm. Oracles: a program whose stacks and pages are known, and squeue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import held_job
from tests.integration.slurm.laptop import Laptop
from tests.integration.slurm.login import GPTCTL, Login, await_true
from tests.lab import Lab


def test_stacks_shell_and_forward(lab: Lab) -> None:
    """Steps of their own, which leave nothing in the allocation; the job completes."""
    login = Login(lab)
    (login.folder / "held.py").write_text(held_job.PROGRAM)
    asked = ["--cluster", "lab", "--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    job = json.loads(login.run("submit", "--json", *asked, "--", "held.py").stdout)["job"]
    ports = held_job.ports(login.run, job, 2)
    held_job.check_stacks(login.run, job)

    def fetched(url: str) -> str:
        return lab.run("head", *held_job.fetch_command(url)).stdout

    held_job.check_forward(login.start, lab.signal, fetched, job, ports[1])
    number = login.json("status", job)["scheduler_id"]
    steps = ["squeue", "-h", "--steps", "-j", str(number), "-o", "%i %j"]
    # The batch script, the ranks, and Slurm's own: no other step is left.
    await_true(lambda: len(login.slurm(*steps).splitlines()) <= 3, 30, lambda: login.slurm(*steps))
    hosts = held_job.release(login.run, job, 2)
    assert hosts == login.json("status", job)["hosts"]
    assert login.wait(job, "COMPLETED")["state"] == "COMPLETED"
    assert "done" in (Path(login.json("status", job)["log_dir"]) / "attempt-0/workerlog.1").read_text()


@pytest.mark.long
def test_terminals_and_killed_sessions(lab: Lab) -> None:
    login = Login(lab)
    (login.folder / "held.py").write_text(held_job.PROGRAM)
    asked = ["--cluster", "lab", "--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    job = json.loads(login.run("submit", "--json", *asked, "--", "held.py").stdout)["job"]
    ports = held_job.ports(login.run, job, 2)
    where = {"cwd": str(login.folder), "env": {**login.env, "SHELL": "/bin/bash"}, "check": False}
    held_job.check_terminal(lambda line: lab.run("head", "bash", "-c", line, **where), f"{GPTCTL} shell {job}")

    def count(mark: str) -> int:
        return len(lab.run("node2", "pgrep", "-f", mark, check=False).stdout.split())

    held_job.check_kill(login.start, lab.signal, count, job, ports[1])
    assert login.run("cancel", "--now", job).returncode == 0


@pytest.mark.long
def test_from_a_laptop(lab: Lab) -> None:
    """The same through a login host: laptop and cluster share nothing."""
    laptop = Laptop(lab)
    laptop.write("laptop", f"{laptop.folder}/held.py", held_job.PROGRAM)
    asked = ["--cluster", "hpc", "--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    job = json.loads(laptop.run("submit", "--json", *asked, "--", "held.py").stdout)["job"]
    ports = held_job.ports(laptop.run, job, 2)
    held_job.check_stacks(laptop.run, job)
    held_job.check_forward(
        laptop.start,
        lab.signal,
        lambda url: lab.run("laptop", *held_job.fetch_command(url)).stdout,
        job,
        ports[1],
    )

    def count(mark: str) -> int:
        return len(lab.run("node2", "pgrep", "-f", mark, check=False).stdout.split())

    held_job.check_kill(laptop.start, lab.signal, count, job, ports[1])
    assert held_job.release(laptop.run, job, 2) == laptop.json("status", job)["hosts"]
    assert laptop.wait(job, "COMPLETED")["state"] == "COMPLETED"
