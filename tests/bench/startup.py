"""CPU seconds of the commands that a login node runs most: `python tests/bench/startup.py`

Median of 5 runs of each command, taken in turns: user + system time of the child. Exit code 1 over a budget.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = 5
CONFIG = str(ROOT / "templates" / "configs" / "mp2-sharding4.yaml")
DEMO = str(ROOT / "templates" / "configs" / "char-gpt.yaml")
GPTCTL = str(Path(sys.executable).with_name("gptctl"))

COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": ([sys.executable, "-c", "pass"], None),
    "gptctl --help": ([GPTCTL, "--help"], 0.15),
    "gptctl validate": ([GPTCTL, "validate", CONFIG], 0.25),
    "gptctl submit --dry-run": ([GPTCTL, "submit", "--dry-run", DEMO], 0.25),
}


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run, from the operating system's account of the finished child."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


def measure() -> dict[str, float]:
    for command, _ in COMMANDS.values():
        cpu_seconds(command)  # warm the file cache, write byte code
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, (command, _) in COMMANDS.items():
            times[name].append(cpu_seconds(command))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    medians = measure()
    base = medians["python -c pass"]
    print(f"{'command':<24} {'CPU s':>7} {'budget':>7} {'ratio to python':>16}")
    for name, (_, budget) in COMMANDS.items():
        print(f"{name:<24} {medians[name]:>7.3f} {budget or '':>7} {medians[name] / base:>16.1f}")
    return int(any(budget and medians[name] > budget for name, (_, budget) in COMMANDS.items()))


if __name__ == "__main__":
    sys.exit(main())
