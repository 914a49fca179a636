"""A login host and commands of Slurm that do not answer. Oracles: the clock, Slurm's queue, and the words that name what is silent."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.integration.slurm.laptop import CUTTER_PORT, Cutter, Laptop
from tests.integration.slurm.login import Login, await_true
from tests.lab import Lab
from tests.lab.machines import HERE

PATIENCE = 3  # seconds: start_timeout of the profile
MORE = 5  # seconds that a command may take besides
SBATCH = 60  # seconds that gptctl waits for sbatch


class MuteLogin(Cutter):
    """Between the laptop and the sshd of the head: makes it mute."""

    def __enter__(self) -> MuteLogin:
        self.say("pass")
        words = [sys.executable, "-IS", str(HERE / "muter.py"), self.folder, str(CUTTER_PORT), "head", "22"]
        self._process = self.laptop.lab.start("laptop", *words, user="gpt", stdout=subprocess.PIPE)
        assert self._process.stdout
        assert self._process.stdout.readline()
        return self

    def say(self, mode: str) -> None:
        self.laptop.write("laptop", f"{self.folder}/mute", mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["silent", "greeting", "drip"])
def test_no_command_waits_longer_for_a_mute_login_host(lab: Lab, mode: str) -> None:
    """Each names the host, and `list` shows what it knew."""
    laptop = Laptop(lab)
    with MuteLogin(laptop) as login:
        laptop.write_profile("quick", python=laptop.stand_in, start_timeout=PATIENCE, **login.profile)
        job = laptop.submit_quick(JOB_SECONDS="300")["job"]
        await_true(lambda: "Slurm job" in laptop.run("logs", job).stdout, 60)
        login.say(mode)
        wrong = []
        for words, code in (
            (("list",), 0),
            (("status", job), 0),
            (("logs", job), 0),
            (("cancel", job), 3),
            (("fetch", job), 3),
            (tuple(laptop.quick()), 3),
        ):
            began = time.monotonic()
            done = laptop.run(*words)
            took = time.monotonic() - began
            print(f"gptctl {' '.join(words)}: {took:.1f} s, exit {done.returncode}\n{done.stdout}{done.stderr}")
            if took > PATIENCE + MORE or done.returncode != code or "Traceback" in done.stderr:
                wrong.append((words[0], took, done.returncode))
        assert not wrong
        login.say("pass")
        assert laptop.run("cancel", job).returncode == 0
        laptop.wait(job, "CANCELLED")
        assert len(laptop.json("list", "--all")) == 1


@pytest.mark.long
@pytest.mark.parametrize("submits", [False, True], ids=["before it submits", "after it has submitted"])
def test_an_sbatch_that_hangs(lab: Lab, submits: bool) -> None:
    """It is not waited for, nor what it started; the job runs once or not at all, and gptctl knows."""
    login = Login(lab)
    hang = "sleep 12345 & wait"
    login.lab.break_client("sbatch", f'"$LAB_REAL" "$@"; {hang}' if submits else hang)
    try:
        began = time.monotonic()
        done = login.run(*login.quick(), timeout=300)
        took = time.monotonic() - began
        print(f"{took:.1f} s, exit {done.returncode}\n{done.stdout}{done.stderr}")
        assert "Traceback" not in done.stderr
        assert took < SBATCH + 15
        assert not lab.run("head", "pgrep", "-xf", "sleep 12345", check=False).stdout
    finally:
        login.lab.restore_client("sbatch")
    jobs = login.json("list", "--all")
    if submits:
        assert done.returncode == 0, done.stderr
        login.wait(jobs[0]["job"], "COMPLETED")
    else:
        assert done.returncode == 3
        assert "sbatch got no answer in 60 s" in done.stderr
        assert jobs == []
    await_true(lambda: not login.slurm("squeue", "-h", "-o", "%Z").count(str(login.folder)), 60)
