"""Jobs on the local cluster, as a person starts them; whatever a test leaves is ended."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptctl.engine.processes import kill_all
from gptctl.jobs.submission_order import ORDER

# A cluster whose interpreter is a shell script: a job is over in milliseconds, and everything around torchrun is real.
QUICK = """#!/bin/sh
echo "node $GPTCTL_NODE of attempt $GPTCTL_ATTEMPT"
exit "${QUICK_CODE:-0}"
"""


class Jobs:
    """A folder with jobs, and gptctl in it."""

    def __init__(self, folder: Path, gptctl) -> None:
        self.folder, self.gptctl = folder, gptctl
        (folder / "quick").write_text(QUICK)
        (folder / "quick").chmod(0o755)
        (folder / "quick.yaml").write_text(f"kind: local\npython: {folder}/quick\nrun_root: ./runs\n")
        (folder / "x.py").write_text("print(1)\n")

    def submit(self, *arguments: str, **env: str) -> str:
        """The id of a job that was accepted."""
        answer = self.gptctl("submit", "--json", *arguments, **env)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return json.loads(answer.stdout)["job"]

    def quick(self, *arguments: str, **env: str) -> str:
        return self.submit("--cluster", "./quick.yaml", *arguments, "--", "x.py", **env)

    def run_dir(self, job: str) -> Path:
        return self.folder / "runs" / job

    def log(self, job: str, rank: int, attempt: int = 0) -> str:
        file = self.run_dir(job) / "logs" / f"attempt-{attempt}" / f"workerlog.{rank}"
        return file.read_text(errors="replace") if file.exists() else ""

    def status(self, job: str) -> dict:
        return json.loads(self.gptctl("status", job, "--json").stdout)

    def wait(self, job: str, seconds: float = 60) -> str:
        answer = self.gptctl("wait", job, "--json", "--timeout", str(seconds))
        return json.loads(answer.stdout)["state"]

    def ended(self, *jobs: str, seconds: float = 60) -> list[str]:
        """The states in which jobs end, by their own records: faster than asking gptctl for each."""
        deadline = time.monotonic() + seconds
        files = [self.run_dir(job) / "result.json" for job in jobs]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, [file for file in files if not file.exists()]
            time.sleep(0.05)
        return [json.loads(file.read_text())["state"] for file in files]

    def waits_for(self, job: str) -> str:
        """What a job notes that it waits for; empty once it runs."""
        file = self.run_dir(job) / "waiting"
        return file.read_text() if file.exists() else ""

    def await_text(self, job: str, rank: int, text: str, attempt: int = 0, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log(job, rank, attempt):
            assert time.monotonic() < deadline, self.log(job, rank, attempt)
            time.sleep(0.05)

    def pid(self, job: str, rank: int, attempt: int = 0) -> int:
        for file in (self.run_dir(job) / f"attempt-{attempt}").glob("ranks.*.jsonl"):
            for line in file.read_text().splitlines():
                event = json.loads(line)
                if event["event"] == "start" and event["rank"] == rank:
                    return event["pid"]
        raise AssertionError(f"rank {rank} has not started")

    def left_over(self) -> list[Path]:
        """Everything in the folder of runs and in the job store but the order of submissions."""
        roots = [self.folder / "runs", self.folder / "home" / ".local" / "state" / "gptctl" / "jobs"]
        return [entry for root in roots if root.is_dir() for entry in root.iterdir() if entry.name != ORDER]


@pytest.fixture
def jobs(tmp_path: Path, gptctl) -> Iterator[Jobs]:
    yield Jobs(tmp_path, gptctl)
    supervisors = subprocess.run(["pgrep", "-f", f"engine.pyz supervisor {tmp_path}/"], capture_output=True, text=True)
    for pid in supervisors.stdout.split():
        subprocess.run(["kill", "-9", pid], check=False)
    for run in (tmp_path / "runs").glob("*"):
        assert not kill_all(str(run))
