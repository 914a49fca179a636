"""How soon a job trains again after one of its ranks was killed: `python tests/bench/restart.py [ROUNDS] [CHECKOUT]`
(or `make bench`), about a minute on two quiet cores.

A job of 2 × 2 ranks on this machine, started by `gptctl submit`; kill -9 of one rank after the other, and a cold start
each time. Reported are medians of seconds since the kill, from the records that the job keeps anyway. Until the next
torchrun starts, it is up to gptctl and the ranks that are left: exit code 1 over that budget. With CHECKOUT, a folder with
another version of this project, both are measured in turns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.recorder import record

T = TypeVar("T")
ROUNDS = 6
MAX_DOWN = 1.0  # seconds until the next torchrun starts
KEYS = (
    "Model.num_layers=1 Model.hidden_size=32 Data.Train.dataset.max_seq_len=16 Global.local_batch_size=2 "
    "Global.micro_batch_size=2 Engine.max_steps=1000000 Engine.eval_freq=1000000 Engine.save_load.save_steps=50"
).split()


class Moments(NamedTuple):
    """Seconds since a rank was killed."""

    recorded: float  # its exit, by its watcher
    others: float  # the exit of the last of the other ranks
    nodes: float  # the exit of the last torchrun
    failed: float  # the engine has ended the attempt
    down: float  # the next torchrun starts
    ranks: float  # the last rank starts
    connected: float
    trains: float  # the next step


class Job:
    """A job that trains until it is stopped."""

    def __init__(self, folder: Path, checkout: Path, restarts: int) -> None:
        self.folder, self.attempt = folder, -1
        self._environment = {**os.environ, "GPTCTL_HOME": str(folder / "home"), "PYTHONPATH": str(checkout)}
        self.gptctl("init")
        shape = ["--nodes", "2", "--gpus-per-node", "2", "--max-restarts", str(restarts)]
        overrides = [word for key in KEYS for word in ("-o", key)]
        self.id = json.loads(self.gptctl("submit", "--json", *shape, *overrides))["job"]
        self.run = folder / "runs" / self.id
        self.await_training()

    def gptctl(self, *arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "gptctl", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, check=True, capture_output=True, text=True
        ).stdout

    def events(self, file: Path, **wanted: object) -> list[dict[str, Any]]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, filter(None, lines)) if wanted.items() <= event.items()]

    def await_training(self) -> None:
        """Until the next attempt has saved a checkpoint: without any, gptctl would give up after some attempts."""
        self.attempt += 1
        file = self.run / "output" / "events.jsonl"
        until(lambda: self.events(file, attempt=self.attempt, event="checkpoint committed"), 120)

    def of_ranks(self, attempt: int, event: str) -> dict[int, dict[str, Any]]:
        files = (self.run / f"attempt-{attempt}").glob("ranks.*.jsonl")
        return {each["rank"]: each for file in files for each in self.events(file, event=event)}

    def kill(self, rank: int) -> Moments:
        before = self.attempt
        os.kill(self.of_ranks(before, "start")[rank]["pid"], signal.SIGKILL)
        began = time.monotonic()
        self.await_training()
        ended, started = self.of_ranks(before, "end"), self.of_ranks(self.attempt, "start")
        (failed,) = self.events(self.run / "events.jsonl", attempt=before, event="failure")
        assert f"rank {rank} " in failed["reason"], failed
        output = self.run / "output" / "events.jsonl"
        trained = {each["event"]: each["clock"] for each in reversed(self.events(output, attempt=self.attempt))}
        clocks = (
            ended.pop(rank)["clock"],
            max(each["clock"] for each in ended.values()),
            self._written(before, "exit"),
            failed["clock"],
            self._written(self.attempt, "pid"),
            max(each["clock"] for each in started.values()),
            trained["process group"],
            trained["first step"],
        )
        return Moments(*(clock - began for clock in clocks))

    def _written(self, attempt: int, kind: str) -> float:
        """When launch.sh wrote the last of these files, by the steady clock."""
        files = [self.run / f"attempt-{attempt}" / f"node.{node}.{kind}" for node in range(2)]
        return max(file.stat().st_mtime for file in files) - time.time() + time.monotonic()

    def end(self) -> None:
        self.gptctl("cancel", self.id, "--now")


def until(condition: Callable[[], T], seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.01)
    return found


def measure(checkout: Path = ROOT, rounds: int = ROUNDS) -> Iterator[Moments]:
    """One restart each time that it is asked for the next one."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), checkout, rounds)
        try:
            for _, rank in zip(range(rounds), cycle((1, 2, 3, 0))):
                yield job.kill(rank)
        finally:
            job.end()


def in_turns(checkouts: list[Path], rounds: int) -> dict[Path, list[Moments]]:
    found: dict[Path, list[Moments]] = {checkout: [] for checkout in checkouts}
    for number in range(rounds):
        for checkout in checkouts[:: 1 if number % 2 else -1]:
            found[checkout] += measure(checkout, 2)
    return found


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    checkouts = [ROOT, *(Path(name).resolve() for name in sys.argv[2:])]
    found = in_turns(checkouts, (rounds + 1) // 2) if len(checkouts) > 1 else {ROOT: list(measure(ROOT, rounds))}
    for checkout, moments in found.items():
        print(f"{checkout.name}: seconds after kill -9 of a rank, medians of {len(moments)} (lowest to highest)")
        for name, times in zip(Moments._fields, zip(*moments)):
            print(f"  {name:10} {median(times):6.2f} ({min(times):.2f} to {max(times):.2f})")
    record("kill -9 of a rank until the next torchrun", ours=[each.down for each in found[ROOT]], goal=MAX_DOWN)
    record("kill -9 of a rank until the next step", ours=[each.trains for each in found[ROOT]])
    print(f"load: {os.getloadavg()[0]:.1f}")
    return int(median(each.down for each in found[ROOT]) > MAX_DOWN)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
