"""What it costs to measure a step: `python tests/bench/measuring.py [ROUNDS]` (or `make bench`), about a minute on two cores.

The trainer's own loop on one process, every step logged, with its timers and events, and with timers that do nothing and no
events; in turns in one run. Then the time of one measured wait, of which a step on several ranks has some dozens. Limit: 1 %
of a step of 4 × 128.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.recorder import record
from tests.bench.training import SMALL, Cost, cost, ours, ratio
from trainer.events import NO_EVENTS, Events
from trainer.step_times import WAIT, HostSpans, measured

STEPS = 20


class NoSpans(HostSpans):
    """Measures nothing."""

    def begin(self) -> Any:
        return None

    def end(self, kind: str, began: Any) -> None:
        return None


def loops(rounds: int) -> tuple[list[Cost], list[Cost]]:
    found: tuple[list[Cost], list[Cost]] = ([], [])
    with tempfile.TemporaryDirectory() as folder, ours(SMALL) as loop:
        os.environ["GPTCTL_ATTEMPT_DIR"] = folder
        t = loop.training
        variants = ((HostSpans(), Events(Path(folder), True, print)), (NoSpans(), NO_EVENTS))
        loop.steps(STEPS)
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                t.metrics.clock.spans, t.events = variants[index]
                found[index].append(cost(lambda: loop.steps(STEPS), STEPS))
    return found


def time_of_a_wait(count: int = 100_000) -> float:
    spans = HostSpans()
    began = time.perf_counter()
    for _ in range(count):
        with measured(spans, WAIT):
            pass
    return (time.perf_counter() - began) / count


def main() -> None:
    measured_loop, plain = loops(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    step = median(each.wall for each in plain)
    print(f"{SMALL}: a step takes {1000 * step:.2f} ms")
    print(
        f"  measured: {ratio(measured_loop, plain, 'wall'):.4f} of the wall time, "
        f"{ratio(measured_loop, plain, 'cpu'):.4f} of the CPU seconds (medians of {len(plain)} turns)"
    )
    record("measured steps, CPU", ours=[c.cpu for c in measured_loop], peer=[c.cpu for c in plain], goal=1.01)
    wait = time_of_a_wait()
    print(f"  a measured wait: {1e6 * wait:.2f} µs; 40 of them are {100 * 40 * wait / step:.3f} % of a step")


if __name__ == "__main__":
    main()
