"""gptctl as a person runs it on the login node of the lab, and jobs that need no torch."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import Lab

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
_NUMBERS = itertools.count()

# In the place of Python with torchrun: what a test of the scheduler needs of a job is when it runs, and how it ends.
STAND_IN = """#!/bin/bash
echo "$GPTCTL_ATTEMPT $(hostname) $*" >> "$GPTCTL_RUN_DIR/ran"
sleep "${JOB_SECONDS:-0}" &
trap 'echo "$GPTCTL_NODE" >> "$GPTCTL_RUN_DIR/asked"; kill $!; exit 1' TERM USR1
wait $!
[ -z "$JOB_HOPELESS" ] || : > "$GPTCTL_ATTEMPT_DIR/unrecoverable"
[ -z "$JOB_TRAINED" ] || echo "{\\"state\\": \\"finished\\", \\"job\\": \\"$GPTCTL_JOB\\"}" > "$JOB_TRAINED/status.json"
[ "$JOB_KILLED" != "$GPTCTL_NODE" ] || kill -9 $PPID
exit "${JOB_EXIT:-0}"
"""
# What a client of Slurm does that kills the gptctl behind it. The parent of sbatch is `timeout`.
KILL_GPTCTL, KILL_SUBMITTER = "kill -9 $PPID", "kill -9 $(ps -o ppid= -p $PPID) $PPID"
# A model small enough for two cores, in few steps; losses in full.
TINY = (
    "Model.num_layers=2 Model.hidden_size=32 Model.num_attention_heads=2 Data.Train.dataset.max_seq_len=16 "
    "Data.Train.dataset.name=CharDataset Data.Train.dataset.path=builtin Model.name=GPT Global.device=cpu "
    "Global.global_batch_size=8 Global.micro_batch_size=2 Engine.logging_freq=1 Engine.eval_freq=0 "
    "Engine.test_iters=0 Generation.num_return_sequences=0"
).split()


class Login:
    """A user's folder and home on the login node."""

    def __init__(self, lab: Lab, **profile: Any) -> None:
        self.lab = lab
        self.gptctl = GPTCTL
        self.folder = lab.shared / f"user-{next(_NUMBERS)}"
        self.folder.mkdir()
        self.stand_in = self.folder / "python"
        self.stand_in.write_text(STAND_IN)
        self.stand_in.chmod(0o755)
        lab.profile(self.folder, **{"python": sys.executable, "run_root": str(self.folder / "runs"), **profile})
        (self.folder / "quick").mkdir()
        (self.folder / "job.py").write_text("")
        (self.folder / "config.yaml").write_text("Global: {device: cpu}\n")
        quick = {"python": str(self.stand_in), "run_root": str(self.folder / "runs"), **profile}
        lab.profile(self.folder / "quick", **quick)
        self.env = {"GPTCTL_HOME": str(self.folder / "home"), "COLUMNS": "200"}

    def run(self, *arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run(
            "head", GPTCTL, *arguments, cwd=str(self.folder), env={**self.env, **env}, check=False, timeout=timeout
        )

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return self.lab.start("head", GPTCTL, *arguments, cwd=str(self.folder), env=self.env, **streams)

    def json(self, *arguments: str, **how: Any) -> Any:
        done = self.run(*arguments, "--json", **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def train(self, *options: str, keys: list[str] = [], **how: Any) -> dict[str, Any]:  # noqa: B006 - read only
        overrides = [word for key in [*TINY, *keys] for word in ("-o", key)]
        return self.json("submit", "--cluster", "lab", *options, *overrides, **how)  # type: ignore[no-any-return]

    def quick(self, *options: str, **env: str) -> list[str]:
        """Arguments that submit a job of the stand-in."""
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        profile = str(self.folder / "quick/clusters/lab.yaml")
        return ["submit", "--cluster", profile, *options, *variables, "--", "job.py"]

    def quick_trainer(self, *options: str, **env: str) -> list[str]:
        """The same, but the stand-in is taken for the bundled trainer."""
        overrides = [word for key in TINY for word in ("-o", key)]
        return [*self.quick("--json", *options, *overrides, **env)[:-2]]

    def submit_quick(self, *options: str, **env: str) -> dict[str, Any]:
        done = self.run(*self.quick("--json", *options, **env))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def state(self, job: str) -> str:
        return str(self.json("status", job)["state"])

    def wait(self, job: str, *states: str, seconds: float = 90) -> dict[str, Any]:
        facts: dict[str, Any] = {}

        def has_come() -> bool:
            facts.update(self.json("status", job))
            return facts["state"] in states

        await_true(has_come, seconds, lambda: f"{job} is {facts}\n{self.batch_log(facts)}")
        return facts

    def batch_log(self, facts: dict[str, Any]) -> str:
        return "\n".join(file.read_text() for file in sorted(Path(facts["log_dir"]).glob("*/batch.log")))

    def slurm(self, *command: str) -> str:
        return self.lab.run("head", *command, check=True).stdout

    def jobs_in_slurm(self) -> list[list[str]]:
        """Id, state and reason of everything that Slurm remembers of this user's folder."""
        lines = self.slurm("squeue", "-h", "-t", "all", "-o", "%i %T %r %Z").splitlines()
        return [line.split(" ", 3) for line in lines if line.endswith(str(self.folder)) or f"{self.folder}/" in line]


def await_true(holds: Callable[[], bool], seconds: float, words: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds} s: {words()}")
        time.sleep(0.1)


def ran(job: dict[str, Any]) -> list[str]:
    """A line for every start of the stand-in on a node."""
    file = Path(job["run_dir"]) / "ran"
    return file.read_text().splitlines() if file.exists() else []


def losses(job: dict[str, Any]) -> dict[int, float]:
    """By step, the last one that was written."""
    lines = (Path(job["run_dir"]) / "output" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
