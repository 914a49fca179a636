"""How fast a checkpoint is: `python tests/bench/checkpoints.py` (or `make bench`), about two minutes on two quiet cores.

    ranks     a rank and four of them save and load 304 MB; one rank 10 MB
    beside    the steps of a training beside a save
    large     like `ranks`, with 2 GB; only if it is asked for

Arguments name the parts to run. Everything is a ratio of two things measured in turns in one run, in an order that rotates:
a save (until it is committed, with its copy of the state) to a raw write with fsync of the same bytes, through the page
cache and past it; the stall of the training loop to a copy of the state; find + verify + load to a raw read, both with an
empty page cache. CPU seconds are those of all threads of all ranks, and of the system for them.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.program import configure_threads

configure_threads()

import torch
from torch import Tensor

from tests.bench.parallel import forked
from tests.bench.recorder import record
from tests.bench.training import LARGE, SMALL, Size, config, ours
from trainer.checkpoint import Checkpoints
from trainer.checkpoint.file_writer import UNIT
from trainer.checkpoint.tensor_files import raw_bytes
from trainer.checkpoint.verification import drop_from_cache
from trainer.layout import Layout
from trainer.mesh import Mesh, join
from trainer.slices import Piece, Slice

READ = 1 << 23
ROUNDS = 6
RAW, DIRECT, SAVE, COPY, STALL, READING, LOAD = "raw", "direct", "save", "copy", "stall", "read", "load"


class Cost(NamedTuple):
    wall: float
    cpu: float


Costs = dict[str, list[Cost]]


def cost(action: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def ratio(ours: list[Cost], theirs: list[Cost], what: str = "wall") -> str:
    """The median of the ratios, with the smallest and the largest."""
    each = sorted(getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs))
    return f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def state(megabytes: float) -> dict[str, Tensor]:
    """A model in fp32 with two moments: matrices of 4 MB or less, and some vectors."""
    rows = int(max(16, min(1024, megabytes * 1000 // 24)))
    count = int(max(1, megabytes * 10**6 // (rows * 1024 * 4)))
    return {f"model.{n}": torch.randn(rows, 1024) for n in range(count)} | {
        f"bias.{n}": torch.randn(1024) for n in range(count)
    }


def pieces(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Piece]:
    """The tensors as this rank's rows of larger ones, as with sharding."""

    def at(tensor: Tensor) -> Slice:
        rows, *rest = tensor.shape
        return Slice((mesh.world * rows, *rest), (mesh.rank * rows, *[0] * len(rest)), tuple(tensor.shape))

    return {name: Piece(tensor, at(tensor)) for name, tensor in tensors.items()}


def raw_write(file: Path, tensors: dict[str, Tensor]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors.values():
        os.write(descriptor, raw_bytes(tensor))
    os.fsync(descriptor)
    os.close(descriptor)


def direct_write(file: Path, data: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    while len(data):
        data = data[os.write(descriptor, data[:READ]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def has_direct_writes(folder: Path) -> bool:
    try:
        direct_write(folder / "direct", mmap_of(UNIT))
    except OSError:
        return False
    return True


def mmap_of(size: int) -> memoryview:
    """Memory that starts at a page, and is there already."""
    memory = mmap.mmap(-1, -(-size // UNIT) * UNIT)
    for place in range(0, len(memory), UNIT):
        memory[place] = 1
    return memoryview(memory)


def raw_read(file: Path) -> None:
    into = memoryview(bytearray(READ))
    with open(file, "rb", buffering=0) as stream:
        while stream.readinto(into):
            pass


class Rounds:
    """The comparisons, in a folder of their own. All ranks do each of them together."""

    def __init__(self, folder: Path, megabytes: float, mesh: Mesh) -> None:
        self.folder, self.mesh, self.step = folder, mesh, 0
        self.tensors = state(megabytes / mesh.world)
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.raw, self.direct = (folder / f"{name}.{mesh.rank}" for name in (RAW, DIRECT))
        self.aligned = mmap_of(sum(t.nbytes for t in self.tensors.values())) if has_direct_writes(folder) else None
        self.checkpoints = Checkpoints(folder / "output", 2, mesh, lambda text: None, print)
        self.checkpoints.open()

    def all(self) -> Costs:
        found: Costs = {}
        for number in range(1 + ROUNDS):  # the first save allocates its buffers
            once = self.once(number)
            for name, spent in once.items() if number else ():
                found.setdefault(name, []).append(spent)
        self.checkpoints.close()
        return found

    def once(self, number: int) -> dict[str, Cost]:
        writes = {RAW: lambda: raw_write(self.raw, self.tensors), SAVE: self.save, COPY: self.copy}
        if self.aligned:
            writes[DIRECT] = lambda: direct_write(self.direct, self.aligned)
        self.raw.unlink(missing_ok=True)
        self.direct.unlink(missing_ok=True)
        found = self.in_turns(writes, number)
        for file in (self.raw, *(self.folder / "output").glob(f"step_*/rank_{self.mesh.rank}.safetensors")):
            drop_from_cache(file)
        found |= self.in_turns({READING: lambda: raw_read(self.raw), LOAD: self.load}, number)
        return found | {STALL: self.stalled}

    def in_turns(self, actions: dict[str, Callable[[], object]], number: int) -> dict[str, Cost]:
        names = list(actions)
        first = number % len(names)
        return {name: self.together(actions[name]) for name in (*names[first:], *names[:first])}

    def together(self, action: Callable[[], object]) -> Cost:
        """Until the last rank is ready; the CPU seconds of all."""
        self.mesh.barrier()
        began = time.perf_counter()
        cpu = cost(action).cpu
        self.mesh.barrier()
        wall = time.perf_counter() - began
        self.checkpoints.verifier.wait(60)  # the next action is measured alone
        return Cost(wall, sum(self.mesh.gather(cpu)))

    def save(self) -> None:
        self.step += 1
        mine = pieces(self.tensors, self.mesh)
        self.stalled = cost(lambda: self.checkpoints.save(self.step, mine, {}, is_waited_for=True))
        failure = self.checkpoints.wait()
        assert not failure, failure

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)

    def load(self) -> None:
        found = self.checkpoints.find("auto")
        assert found
        targets = pieces(self.copies, self.mesh)
        shapes = {name: piece.at.whole for name, piece in targets.items()}
        self.checkpoints.load(found, targets, shapes, lambda facts, folder: None)


def spent_by(world: int, megabytes: float) -> Costs:
    def measure(folder: Path) -> Costs:
        keys = {"Distributed.sharding.sharding_degree": world, "Global.micro_batch_size": SMALL.batch // world}
        run, layout = config(SMALL, folder / "unused", **keys), Layout(sharding=world)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        # The folder of the ranks' results may be in memory.
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name, join(run, layout) as mesh:
            shared = Path(mesh.gather(name)[0])
            return Rounds(shared, megabytes, mesh).all()

    found: dict[str, Any] = forked(world, measure)
    return {name: [Cost(*each) for each in costs] for name, costs in found.items()}


def report_ranks(world: int, megabytes: float) -> None:
    found = spent_by(world, megabytes)
    wall = median(each.wall for each in found[SAVE])
    # 0.9 of the speed of a raw write, and 1.5 times the time of a copy and of a raw read.
    for mine, peer, goal in ((SAVE, RAW, 1 / 0.9), (STALL, COPY, 1.5), (LOAD, READING, 1.5)):
        walls = [[each.wall for each in found[name]] for name in (mine, peer)]
        record(f"{mine} of {megabytes} MB, {world} ranks", ours=walls[0], peer=walls[1], goal=goal)
    print(f"{megabytes} MB, {world} {'rank' if world == 1 else 'ranks'}: a save takes {wall * 1e3:.0f} ms")
    for name, text in {RAW: "a raw write with fsync", DIRECT: "one past the page cache"}.items():
        if name in found:
            print(
                f"  it reaches {ratio(found[name], found[SAVE])} of the speed of {text}, "
                f"with {ratio(found[SAVE], found[name], 'cpu')} times its CPU seconds"
            )
    print(f"  the training loop waits {ratio(found[STALL], found[COPY])} times as long as a copy takes")
    print(
        f"  find + verify + load take {ratio(found[LOAD], found[READING])} times as long as a raw cold read, "
        f"and {ratio(found[LOAD], found[READING], 'cpu')} times its CPU seconds",
        flush=True,
    )


def report_beside(size: Size, rounds: int, steps: int) -> None:
    """Steps alone, and as many beside a save and its verification; which comes first changes."""
    with ours(size) as trainer:
        tensors = trainer.training.optimizer.tensors
        found: Costs = {"alone": [], "beside": []}

        def beside() -> None:
            trainer.checkpoints.save(trainer.training.progress.step, tensors(), {})
            found["beside"].append(cost(lambda: trainer.steps(steps)))
            trainer.checkpoints.wait()
            trainer.checkpoints.verifier.wait(60)

        trainer.steps(2)
        beside()  # allocates the buffers
        found["beside"].clear()
        for number in range(rounds):
            for action in (0, 1) if number % 2 else (1, 0):
                if action:
                    beside()
                else:
                    found["alone"].append(cost(lambda: trainer.steps(steps)))
        megabytes = sum(piece.tensor.nbytes for piece in tensors().values()) / 1e6
    walls = {name: [each.wall for each in costs] for name, costs in found.items()}
    record(f"steps of {size} beside a save", ours=walls["beside"], peer=walls["alone"], goal=1.05)
    alone = median(walls["alone"])
    print(
        f"{size}: {steps} steps ({alone:.2f} s) beside a save of {megabytes:.0f} MB and its verification take "
        f"{ratio(found['beside'], found['alone'])} of their time alone",
        flush=True,
    )


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)  # for the forks; see tests/ranks.py
    if "large" in parts:
        report_ranks(1, 2000)
        report_ranks(4, 2000)
    if "ranks" in parts:
        report_ranks(1, 10)
        report_ranks(1, 304)
        report_ranks(4, 304)
    if "beside" in parts:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        report_beside(SMALL, 5, 30)
        report_beside(LARGE, 4, 4)


if __name__ == "__main__":
    main(sys.argv[1:] or ["ranks", "beside"])
