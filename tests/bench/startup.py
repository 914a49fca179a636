"""CPU seconds of the commands that a login node runs most: `python tests/bench/startup.py`

All commands run in turn, in several rounds; the time of a run is user + system time of the child. Two budgets: the median
in seconds (DESIGN 4), and the minimum against that of `python -c pass`, which holds on a slow or busy machine too. Exit
code 1 over a budget.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.recorder import record
from tests.job_records import add_job

ROUNDS = 9
CONFIG = str(ROOT / "templates" / "configs" / "mp2-sharding4.yaml")
DEMO = str(ROOT / "templates" / "configs" / "char-gpt.yaml")
GPTCTL = str(Path(sys.executable).with_name("gptctl"))
BASE = "python -c pass"


MANY = 2000  # jobs


class Budget(NamedTuple):
    command: list[str]
    seconds: float = float("inf")
    ratio: float = float("inf")  # to `python -c pass`


COMMANDS = {
    BASE: Budget([sys.executable, "-c", "pass"]),
    "gptctl --help": Budget([GPTCTL, "--help"], 0.15, 5.5),
    "gptctl validate": Budget([GPTCTL, "validate", CONFIG], 0.25, 9),
    "gptctl submit --dry-run": Budget([GPTCTL, "submit", "--dry-run", DEMO], 0.25, 11),
    f"gptctl list --all of {MANY:,}": Budget([GPTCTL, "list", "--all"], 0.25, 20),
}


def many_jobs(root: Path) -> None:
    """Jobs that have ended, as an engineer has them after a year."""
    for number in range(MANY):
        add_job(root, f"gpt-{number:06x}", days=1 + number / 24, loss=2.0)
    settled = time.time() - 60
    for path in [*root.rglob("*")][::-1]:
        os.utime(path, (settled, settled))


def cpu_seconds(command: list[str], home: Path) -> float:
    """User and system time of one run, from the operating system's account of the finished child."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["GPTCTL_HOME"] = str(home)
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


class Startup:
    """Times of every command, by round. More rounds make the minima more precise."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self._folder = tempfile.TemporaryDirectory()
        self._home = Path(self._folder.name, "home")
        many_jobs(self._home.parent)
        for budget in COMMANDS.values():
            cpu_seconds(budget.command, self._home)  # fill the file cache, write byte code, keep rows

    def measure(self, rounds: int = ROUNDS) -> None:
        for _ in range(rounds):
            for name, budget in COMMANDS.items():
                self.times[name].append(cpu_seconds(budget.command, self._home))

    def seconds(self, name: str) -> float:
        """The median of the last rounds: an earlier disturbance does not count for ever."""
        return statistics.median(self.times[name][-ROUNDS:])

    def ratio(self, name: str) -> float:
        """Minima: a neighbour on the same core only ever adds CPU seconds, and never to all rounds."""
        return min(self.times[name]) / min(self.times[BASE])

    def over_budget(self) -> list[str]:
        found = []
        for name, budget in COMMANDS.items():
            if self.seconds(name) > budget.seconds:
                found.append(f"{name}: {self.seconds(name):.3f} s > {budget.seconds} s")
            if self.ratio(name) > budget.ratio:
                found.append(f"{name}: {self.ratio(name):.1f} x > {budget.ratio} x {BASE}")
        return found


def main() -> int:
    startup = Startup()
    startup.measure()
    print(f"{'command':<30} {'CPU s':>7} {'budget':>7} {'ratio':>7} {'budget':>7}")
    for name, budget in COMMANDS.items():
        limits = ["" if limit == float("inf") else limit for limit in budget[1:]]
        print(f"{name:<30} {startup.seconds(name):>7.3f} {limits[0]:>7} {startup.ratio(name):>7.1f} {limits[1]:>7}")
        if name != BASE:
            record(f"{name}, CPU", ours=startup.times[name], peer=startup.times[BASE], goal=budget.ratio)
    return int(bool(startup.over_budget()))


if __name__ == "__main__":
    sys.exit(main())
