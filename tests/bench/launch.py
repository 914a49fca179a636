"""How long it takes until all ssh hosts of a job are ready: `python tests/bench/launch.py`

Real sshd hosts in namespaces of this machine. Each gets a tenth of a core, whether it works alone or with others, as
machines have CPUs of their own; without such a limit (also reported) two cores do the work of all of them in turns.
Reported are seconds between what `gptctl submit` says when it begins to connect and when all hosts are ready, 8 hosts
and 1 in turns, and the ratio of their medians. Exit code 1 over the budget.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.recorder import record
from tests.integration.ssh.desk import Desk
from tests.lab import Lab, missing
from tests.lab.shares import Shares

HOSTS = 8
MAX_RATIO = 2.0
SHARE = 0.1


def time_to_ready(desk: Desk, nodes: int) -> float:
    asked = ["submit", "--cluster", "eight", "--nodes", str(nodes), "--gpus-per-node", "1", "--json", "--", "job.py"]
    with desk.start(*asked, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr
        said = {line.split()[0]: time.perf_counter() for line in process.stderr}
    assert process.returncode == 0, said
    return said["all"] - said["connecting"]


class Times(NamedTuple):
    one: float
    all_of_them: float

    @property
    def ratio(self) -> float:
        return self.all_of_them / self.one

    def __str__(self) -> str:
        return f"1 host ready in {self.one:.2f} s, {HOSTS} hosts in {self.all_of_them:.2f} s: {self.ratio:.2f} ×"


def measure(rounds: int, share: float | None) -> Times:
    """Medians; `share`: of a core, for each host."""
    if lacking := missing():
        raise RuntimeError(lacking)
    names = [f"ssh{number}" for number in range(1, HOSTS + 1)]
    with Shares() as shares, Lab(nodes=0, ssh=HOSTS) as lab:
        for name in names if share else ():
            shares.give(lab, name, share or 0)
        desk = Desk(lab)
        hosts = [{"host": name, "address": f"10.78.0.{50 + number}"} for number, name in enumerate(names, 1)]
        desk.write_profile("eight", hosts=hosts, python=str(desk.stand_in), start_timeout=30)
        pairs = [(time_to_ready(desk, 1), time_to_ready(desk, HOSTS)) for _ in range(rounds)]
    return Times(*(statistics.median(times) for times in zip(*pairs)))


def main() -> int:
    own = measure(rounds=5, share=SHARE)
    record(f"start of {HOSTS} hosts", ours=[own.all_of_them], peer=[own.one], goal=MAX_RATIO)
    print(f"{own} (budget {MAX_RATIO}), each host with {SHARE:.0%} of a core")
    print(f"{measure(rounds=5, share=None)}, hosts that share {os.cpu_count()} cores")
    return int(own.ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
