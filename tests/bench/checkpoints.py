"""How fast a checkpoint is: `python tests/bench/checkpoints.py` (or `make bench`), about a minute.

Everything is a ratio of two things measured in turns: a save to a raw write with fsync of the same bytes, the stall of the
training loop to a copy of the state, and a load to a raw read, both with an empty page cache. CPU seconds are those of
all threads.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from trainer.checkpoint import Checkpoints
from trainer.checkpoint.tensor_files import raw_bytes
from trainer.checkpoint.verification import drop_from_cache
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.slices import shapes, whole

MESH = Mesh(Layout(), 0, 0, torch.device("cpu"))
SIZES = {"10 MB": 10, "512 MB": 512}
READ = 1 << 23
ROUNDS = 7


class Cost(NamedTuple):
    wall: float
    cpu: float


def cost(action: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def ratio(ours: list[Cost], theirs: list[Cost], what: str = "wall") -> str:
    """The median of the ratios, with the smallest and the largest."""
    each = sorted(getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs))
    return f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def state(megabytes: int) -> dict[str, Tensor]:
    """A model in fp32 with two moments: matrices of 4 MB or less, and some vectors."""
    rows = max(16, min(1024, megabytes * 1000 // 24))
    count = max(1, megabytes * 10**6 // (rows * 1024 * 4))
    return {f"model.{n}": torch.randn(rows, 1024) for n in range(count)} | {
        f"bias.{n}": torch.randn(1024) for n in range(count)
    }


def raw_write(file: Path, tensors: dict[str, Tensor]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors.values():
        os.write(descriptor, raw_bytes(tensor))
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(file: Path) -> None:
    into = memoryview(bytearray(READ))
    with open(file, "rb", buffering=0) as stream:
        while stream.readinto(into):
            pass


class Rounds:
    """The three comparisons, in a folder of their own."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder, self.tensors, self.step = folder, tensors, 0
        self.copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self.checkpoints = Checkpoints(folder / "output", 2, MESH, lambda text: None, print)
        self.checkpoints.open()
        self.raw: list[Cost] = []
        self.saves: list[Cost] = []
        self.copied: list[Cost] = []
        self.stalls: list[Cost] = []
        self.read: list[Cost] = []
        self.loads: list[Cost] = []

    def save(self) -> None:
        self.step += 1
        self.stalls.append(cost(lambda: self.checkpoints.save(self.step, whole(self.tensors), {})))
        self.checkpoints.wait()

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)

    def load(self) -> None:
        found = self.checkpoints.find("auto")
        assert found
        self.checkpoints.load(found, whole(self.copies), shapes(self.copies), lambda facts, folder: None)

    def once(self) -> None:
        raw = self.folder / "raw"
        raw.unlink(missing_ok=True)
        self.raw.append(cost(lambda: raw_write(raw, self.tensors)))
        self.copied.append(cost(self.copy))
        saved = cost(self.save)
        self.saves.append(Cost(saved.wall - self.stalls[-1].wall, saved.cpu - self.stalls[-1].cpu))
        self.checkpoints.verifier.wait(60)
        for file in (raw, *(self.folder / "output").glob("step_*/*.safetensors")):
            drop_from_cache(file)
        self.read.append(cost(lambda: raw_read(raw)))
        self.loads.append(cost(self.load))


def report(name: str, megabytes: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    rounds = Rounds(folder, state(megabytes))
    try:
        for _ in range(1 + ROUNDS):
            rounds.once()
    finally:
        rounds.checkpoints.close()
        shutil.rmtree(folder)
    later = slice(1, None)  # the first save allocates its buffers
    speed = megabytes / median(each.wall for each in rounds.saves[later])
    print(
        f"{name}: a raw write takes {ratio(rounds.raw[later], rounds.saves[later])} of the time of a save, at {speed:.0f} MB/s; "
        f"a save takes {ratio(rounds.saves[later], rounds.raw[later], 'cpu')} times its CPU seconds"
    )
    print(
        f"  the training loop waits {ratio(rounds.stalls[later], rounds.copied[later])} times as long as a copy takes"
    )
    print(f"  a load takes {ratio(rounds.loads[later], rounds.read[later])} times as long as a raw cold read")


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for name, megabytes in SIZES.items():
        report(name, megabytes)
