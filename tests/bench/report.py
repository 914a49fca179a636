"""What a report costs: `python tests/bench/report.py`

`gptctl report` on made-up jobs of 10,000 logged steps: 64 ranks, 1,024 ranks, and three runs of 64 ranks. Reported are wall
time, CPU seconds and peak memory of the command, from the operating system's account of the child, and the size of the page.
The limit is what Python's own JSON parser needs to read the same files once. Exit code 1 over a budget.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.recorder import record
from tests.job_records import add_job

STEPS = 10_000
MOST_SECONDS, MOST_MB = 10.0, 300.0  # for 1,024 ranks
MOST_KB = 400.0  # of one run
READ = "import json, sys\nfor name in sys.argv[1:]:\n for line in open(name): json.loads(line)"


class Cost(NamedTuple):
    wall: float
    cpu: float
    memory_mb: float


def made_up_job(root: Path, name: str, ranks: int) -> Path:
    """A finished job whose trainer recorded every step."""
    record = add_job(root, name, ran=2.0 * STEPS)
    output, numbers = Path(record.output_dir), random.Random(ranks)
    began = record.created + 30
    with open(output / "metrics.jsonl", "w") as metrics, open(output / "rank_times.jsonl", "w") as times:
        for step in range(1, STEPS + 1):
            common = {"time": began + 2 * step, "clock": 2.0 * step, "job": name, "attempt": 0}
            parts = {
                "step": step, "max_steps": STEPS, "samples": 512 * step, "tokens": 524288 * step, "loss": 11 / step**0.2 + numbers.random() / 9,
                "lr": 3e-4, "grad_norm": 1 + numbers.random(), "tokens_per_second": 260000 + 9999 * numbers.random(),
                "step_time": 2.0, "reader_time": 0.01, "compute_time": 1.7 + numbers.random() / 9, "wait_time": 0.2 * numbers.random(),
                "optimizer_time": 0.05, "memory": 6 * 10**10, "mfu": 0.45,
            }  # fmt: skip
            metrics.write(json.dumps({**parts, **common}) + "\n")
            own = [round(1700 * numbers.uniform(0.97, 1.03), 2) for _ in range(ranks)]
            own[ranks // 3] *= 1.2
            times.write(json.dumps({"step": step, "own_ms": own, **common}) + "\n")
    with open(output / "events.jsonl", "w") as events:
        for number, event in enumerate(
            ["process group", "first step", *["checkpoint", "checkpoint committed"] * 500, "finished"]
        ):
            facts = {
                "event": event,
                "time": began + 2 * STEPS * number / 1002,
                "job": name,
                "attempt": 0,
                "host": "node1",
            }
            events.write(json.dumps(facts) + "\n")
    return output


def cost_of(words: list[str], root: Path) -> Cost:
    """Run a command, and ask the system what it used."""
    environment = {**os.environ, "GPTCTL_HOME": str(root / "home")}
    began = time.monotonic()
    child = subprocess.Popen(words, env=environment, cwd=root, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, words
    return Cost(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def main() -> int:
    is_over = False
    print(f"load average {os.getloadavg()[0]:.2f}; {STEPS:,} logged steps")
    print("runs  ranks  wall s  CPU s  × reading  peak MB  page KB")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for runs, ranks in ((1, 64), (3, 64), (1, 1024)):
            jobs = [f"gpt-{ranks}-{number}" for number in range(runs)]
            for job in jobs:
                if not (root / "runs" / job).exists():
                    made_up_job(root, job, ranks)
            files = [
                str(root / "runs" / job / "output" / f"{name}.jsonl")
                for job in jobs
                for name in ("metrics", "rank_times")
            ]
            reading = cost_of([sys.executable, "-c", READ, *files], root)
            page = root / f"{runs}-{ranks}.html"
            cost = cost_of([sys.executable, "-m", "gptctl", "report", *jobs, "--output", str(page)], root)
            size = page.stat().st_size / 1000
            is_over |= cost.wall > MOST_SECONDS or cost.memory_mb > MOST_MB or size > MOST_KB * max(1, runs)
            ratio = cost.cpu / reading.cpu
            record(f"report of {runs} runs of {ranks} ranks, CPU", ours=[cost.cpu], peer=[reading.cpu])
            print(
                f"{runs:4}  {ranks:5}  {cost.wall:6.2f}  {cost.cpu:5.2f}  {ratio:9.2f}  {cost.memory_mb:7.0f}  {size:7.0f}"
            )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
