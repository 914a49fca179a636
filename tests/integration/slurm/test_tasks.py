"""Tasks as Slurm jobs, from a laptop and on a login node. Oracle: the same task in the foreground."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.slurm.laptop import Laptop
from tests.integration.slurm.login import Login
from tests.lab import Lab

CPU = ("-o", "Global.device=cpu")
STEPS = ("Engine.max_steps=4",)
TEXT = "the quick brown fox jumps over the lazy dog"


def ppl_in(log: str) -> float:
    (measured,) = re.findall(r"^\[rank 0\] ppl +([0-9.]+)$", log, re.MULTILINE)
    return float(measured)


@pytest.mark.long
def test_a_laptop_evaluates_on_the_cluster(lab: Lab) -> None:
    laptop = Laptop(lab)
    job = laptop.json(*laptop.train("--nodes", "2", "--wait", keys=STEPS))["job"]
    laptop.write("head", "/home/gpt/fox.txt", TEXT)
    laptop.write("laptop", f"{laptop.folder}/fox.txt", TEXT)
    done = laptop.run("eval", job, "/home/gpt/fox.txt", *CPU)
    assert done.returncode == 2
    assert f"gptctl fetch {job} --checkpoints; or run there: --cluster hpc" in done.stderr

    done = laptop.run("eval", job, "/home/gpt/fox.txt", "--cluster", "hpc", *CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = ppl_in(done.stdout)
    assert laptop.run("fetch", job, "--checkpoints").returncode == 0
    here = laptop.run("eval", job, "fox.txt", *CPU, "--json")
    assert json.loads(here.stdout)["ppl"] == pytest.approx(measured, rel=1e-5)


@pytest.mark.long
def test_a_login_node_evaluates_in_another_layout(lab: Lab) -> None:
    login = Login(lab)
    job = login.train("--nodes", "2", "--wait", keys=STEPS)["job"]
    (login.folder / "fox.txt").write_text(TEXT)
    here = login.run("eval", job, "fox.txt", *CPU, "--json")
    assert here.returncode == 0, here.stderr
    halves = ("--cluster", "lab", "--nodes", "2", "-o", "Distributed.pp_degree=2")
    done = login.run("eval", job, "fox.txt", *CPU, *halves)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ppl_in(done.stdout) == pytest.approx(json.loads(here.stdout)["ppl"], rel=1e-5)
