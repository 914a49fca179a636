"""What `Engine.compile` gains: `python tests/bench/compiling.py` (or `make bench`), about three minutes on two cores.

Tokens per second of the trainer's own loop on one process, with and without compiled layers, in turns in one run. `auto`
must choose the faster one: `AUTO` in `trainer/compiling.py` has the devices on which it compiles.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.recorder import record
from tests.bench.training import LARGE, SMALL, Cost, Size, cost, ours, ratio


def report(size: Size, rounds: int, steps: int) -> None:
    eager: list[Cost] = []
    compiled: list[Cost] = []
    with ours(size, **{"Engine.compile": "false"}) as plain, ours(size, **{"Engine.compile": "true"}) as fast:
        plain.steps(2)
        started = time.perf_counter()
        fast.steps(2)
        first = time.perf_counter() - started
        for _ in range(rounds):
            eager.append(cost(lambda: plain.steps(steps), steps))
            compiled.append(cost(lambda: fast.steps(steps), steps))
    tokens = size.batch * size.block
    speeds = [tokens / median(each.wall for each in costs) for costs in (eager, compiled)]
    record(f"compiled step of {size}", ours=[c.wall for c in compiled], peer=[c.wall for c in eager])
    print(f"{size}: {speeds[0]:.0f} tokens/s, compiled {speeds[1]:.0f} tokens/s")
    print(
        f"  compiled: {ratio(compiled, eager, 'wall'):.3f} of the wall time, {ratio(compiled, eager, 'cpu'):.3f} of the "
        f"CPU seconds; its first two steps took {first:.0f} s"
    )


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    report(SMALL, rounds, 20)
    report(LARGE, rounds, 2)
