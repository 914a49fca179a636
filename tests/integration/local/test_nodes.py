"""shell, stacks and forward on this machine. Oracles: a program whose stacks and pages are known, and the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine.processes import processes_of
from tests.integration import held_job

GPTCTL = str(Path(sys.executable).with_name("gptctl"))


def submit(jobs) -> str:
    (jobs.folder / "held.py").write_text(held_job.PROGRAM)
    asked = ["--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    return jobs.submit(*asked, "--", "held.py")


def test_stacks_shell_and_forward(jobs) -> None:
    """The job goes on afterwards and completes; then each verb says that it is over."""
    job = submit(jobs)
    ports = held_job.ports(jobs.gptctl, job, 2)
    running = sorted(processes_of(str(jobs.run_dir(job))))
    held_job.check_stacks(jobs.gptctl, job)

    def fetched(url: str) -> str:
        return subprocess.run(held_job.fetch_command(url), capture_output=True, text=True).stdout

    def start(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
        env = {**os.environ, "HOME": str(jobs.folder / "home")}
        return subprocess.Popen([GPTCTL, *arguments], cwd=jobs.folder, env=env, **streams)

    held_job.check_forward(start, subprocess.Popen.send_signal, fetched, job, ports[1])
    same = jobs.gptctl("forward", job, str(ports[0]))
    assert same.stdout == f"http://127.0.0.1:{ports[0]}\n"
    assert same.stderr == f"{job} runs on this machine: nothing has to be forwarded\n"
    assert sorted(processes_of(str(jobs.run_dir(job)))) == running
    assert held_job.release(jobs.gptctl, job, 1) == [os.uname().nodename]
    assert jobs.wait(job) == "COMPLETED"
    for verb in (["stacks", job], ["shell", job], ["forward", job, "6006"]):
        done = jobs.gptctl(*verb)
        assert done.returncode == 1
        assert f"{job} is not running any more: COMPLETED" in done.stderr


@pytest.mark.long
def test_a_rank_that_does_not_answer_is_named_and_a_shell_has_a_terminal(jobs) -> None:
    job = submit(jobs)
    held_job.ports(jobs.gptctl, job, 2)
    os.kill(jobs.pid(job, 1), signal.SIGSTOP)
    done = jobs.gptctl("stacks", job)
    assert done.returncode == 1
    assert done.stdout.endswith("rank 1: no answer in 5 s; state of its process: T (stopped)\n"), done.stdout
    os.kill(jobs.pid(job, 1), signal.SIGCONT)

    def run(line: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(jobs.folder / "home"), "SHELL": "/bin/bash"}
        return subprocess.run(["bash", "-c", line], cwd=jobs.folder, env=env, capture_output=True, text=True)

    held_job.check_terminal(run, f"{GPTCTL} shell {job}")
    held_job.release(jobs.gptctl, job, 1)
    assert jobs.wait(job) == "COMPLETED"
