"""What watching a job of 1,024 ranks costs: `python tests/bench/top.py [--seconds 20]`

`gptctl top` runs on a terminal of 160 x 50 at its default interval, in full screen and with its threads. The job has logged
10,000 steps with the times of all ranks, and logs another one every half second. Reported is the share of one core that
it needs after its start, from the operating system's account, once for all jobs and once for this job. Exit code 1 over
the budget.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.bench.recorder import record
from tests.job_records import add_job

RANKS, STEPS, NODES = 1024, 10_000, 128
MAX_SHARE, MAX_RSS_MB = 0.05, 250.0
STARTED = 6.0  # seconds for the start, and the first reading of everything


class Watched(NamedTuple):
    cpu_share: float
    max_rss_mb: float
    first: float  # CPU seconds of the start


def make_job(folder: Path) -> Path:
    """A job that this process seems to run; returns its output folder."""
    facts = {"nodes": NODES, "per_node": RANKS // NODES, "world": RANKS}
    record = add_job(folder, "gpt-3f9a2c", "RUNNING", **facts)
    run, output, logs = Path(record.local_dir), Path(record.output_dir), Path(record.log_dir, "attempt-0")
    began = time.time() - STEPS
    for node in range(NODES):
        starts = [{"event": "start", "rank": 8 * node + local, "node": node, "time": began} for local in range(8)]
        (run / "attempt-0" / f"ranks.{node}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in starts))
    events = [
        {"event": "started", "time": began, "nodes": NODES, "per_node": 8},
        {"event": "attempt", "time": began, "attempt": 0},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    first = {"event": "first step", "time": began + 1, "attempt": 0, "resumed": 0}
    (output / "events.jsonl").write_text(json.dumps(first) + "\n")
    logs.mkdir(parents=True)
    for rank in range(RANKS):
        (logs / f"workerlog.{rank}").write_text(f"rank {rank}: ready\n" * 20)
    write_steps(output, began, 1, STEPS)
    return output


def write_steps(output: Path, began: float, first: int, count: int) -> None:
    own_ms = [round(random.uniform(9.8, 10.2), 2) for _ in range(RANKS)]
    own_ms[517] = 18.0
    numbers = json.dumps(own_ms)
    with (output / "metrics.jsonl").open("a") as metrics, (output / "rank_times.jsonl").open("a") as times:
        for step in range(first, first + count):
            facts = {
                "step": step, "loss": 11 / step**0.2 + random.gauss(0, 0.02), "lr": 1e-4, "grad_norm": 0.9,
                "tokens_per_second": random.gauss(4e6, 2e5), "mfu": 0.4, "step_time": 0.9, "reader_time": 0.01,
                "compute_time": 0.7, "wait_time": 0.1, "optimizer_time": 0.05, "memory": 6e10, "max_steps": 20_000,
            }  # fmt: skip
            who = {"job": "gpt-3f9a2c", "attempt": 0, "time": began + step, "clock": step}
            metrics.write(json.dumps({**facts, **who}) + "\n")
            times.write(
                f'{{"step": {step}, "time": {began + step}, "attempt": 0, "job": "gpt-3f9a2c", "own_ms": {numbers}}}\n'
            )


def watch(folder: Path, words: list[str], seconds: float) -> Watched:
    terminal, inside = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    env = {**os.environ, "GPTCTL_HOME": str(folder / "home"), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-m", "gptctl", "top", *words], stdin=inside, stdout=inside, stderr=inside, env=env, cwd=folder, start_new_session=True
    )  # fmt: skip
    os.close(inside)
    shown = bytearray()
    threading.Thread(target=drain, args=(terminal, shown), daemon=True).start()
    time.sleep(STARTED)
    first, began = cpu_of(child.pid), time.monotonic()
    time.sleep(seconds)
    used, passed = cpu_of(child.pid) - first, time.monotonic() - began
    memory = int(Path(f"/proc/{child.pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    os.write(terminal, b"q")
    assert child.wait(20) == 0
    assert b"gpt-3f9a2c" in shown
    return Watched(used / passed, memory, first)


def drain(terminal: int, shown: bytearray) -> None:
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # the program has closed its terminal
            return


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(seconds: float) -> dict[str, Watched]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = make_job(folder)
        ended = threading.Event()

        def train() -> None:
            step = STEPS
            while not ended.wait(0.5):
                step += 1
                write_steps(output, time.time() - step, step, 1)

        writer = threading.Thread(target=train)
        writer.start()
        try:
            return {"all jobs": watch(folder, [], seconds), "one job": watch(folder, ["gpt-3f9a2c"], seconds)}
        finally:
            ended.set()
            writer.join()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    found = measured(parser.parse_args().seconds)
    print(f"{'top, 1,024 ranks x 10,000 steps':<32} {'CPU':>6} {'RSS MB':>7} {'start, CPU s':>13}")
    for what, seen in found.items():
        print(f"{what:<32} {seen.cpu_share:>6.1%} {seen.max_rss_mb:>7.0f} {seen.first:>13.2f}")
        record(f"top of {what}, share of a core", ours=[seen.cpu_share], goal=MAX_SHARE, unit="cores")
    over = any(seen.cpu_share > MAX_SHARE or seen.max_rss_mb > MAX_RSS_MB for seen in found.values())
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
