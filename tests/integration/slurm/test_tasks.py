"""Tasks as Slurm jobs, from a laptop and on a login node. Oracle: the same task in the foreground."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.slurm.laptop import Laptop
from tests.integration.slurm.login import Login, await_true
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


@pytest.mark.long
def test_a_login_node_prepares_data_on_a_node(lab: Lab) -> None:
    """A job that was cancelled continues. Oracle: the same files, prepared in the foreground."""
    login = Login(lab)
    lines = "".join(json.dumps({"text": f"{number} {TEXT} " * 5}) + "\n" for number in range(300_000))
    (login.folder / "fox.jsonl").write_text(lines)
    words = ("data", "prepare", "fox.jsonl", "--shard-mb", "2")
    missing = login.run(*words[:2], "nowhere.jsonl", "--output", "x", "--cluster", "lab", "--detach")
    assert (missing.returncode, "no input at nowhere.jsonl" in missing.stderr) == (2, True)

    job = login.json(*words, "--output", "there/x", "--cluster", "lab", "--detach")["job"]
    await_true(lambda: len(list(login.folder.glob("there/x.shards/shard-*.json"))) > 1, 90, lambda: login.state(job))
    assert login.run("cancel", job).returncode == 0
    login.wait(job, "CANCELLED", "STOPPED", "FAILED", "COMPLETED")
    assert not (login.folder / "there/x_meta.json").exists()
    done = login.run(*words, "--output", "there/x", "--cluster", "lab")
    assert done.returncode == 0, done.stdout + done.stderr
    (resumed,) = re.findall(r"^\[rank 0\] resumed_shards +([0-9]+)$", done.stdout, re.MULTILINE)
    assert int(resumed) > 1
    done = login.run(*words, "--output", "here/x")
    assert done.returncode == 0, done.stderr
    for name in ("x_ids.npy", "x_idx.npz", "x_meta.json"):
        assert (login.folder / "there" / name).read_bytes() == (login.folder / "here" / name).read_bytes()
