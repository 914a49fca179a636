"""What each parallel axis costs: `python tests/bench/parallel.py` (or `make bench`), about seven minutes on two cores.

    steps     CPU and wall seconds of a step on two processes with a thread each, against one process with one thread and with two
    bubbles   the time of pipeline schedules whose stages only sleep, so that four of them need no four cores
    loss      memory and time of the cross entropy in chunks, against that of all logits

`steps`, `bubbles` or `loss` as an argument runs that part alone. Everything is a ratio of things measured in turns in
one run. The references were measured once with hand-written loops over the same parts of torch 2.13, on two quiet
cores; `!` marks what is more than 1.2 times as much.
"""

from __future__ import annotations

import ctypes
import json
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
import torch.nn.functional as F
from torch import Tensor, nn

import trainer.parallel.sharding  # noqa: F401 - imported once, for all forks
from tests.bench.recorder import record
from tests.bench.training import Cost, Ours, Size, config, cost, ratio
from tests.ranks import fork, free_port
from trainer.config.resolve import layout_of
from trainer.config.sections import RunConfig
from trainer.data import LocalBatch
from trainer.events import NO_EVENTS
from trainer.loss import chunked_loss
from trainer.mesh import Mesh, join
from trainer.metrics import Log
from trainer.parallel.pipeline import Pipeline
from trainer.precision import Precision
from trainer.resume import output_folder

TOLERANCE = 1.2
LARGE, SMALL = Size(8, 512, 8, 128, 8), Size(4, 128, 4, 128, 16)
SHARDING, VIRTUAL = "Distributed.sharding", "Model.virtual_pp_degree"


class Case(NamedTuple):
    """A layout, its micro-batches per update, and the CPU ratios to compare with: large, small.

    `speed`: its goal for tokens/s of the large model, relative to one process with two threads.
    """

    micro_batches: int
    keys: dict[str, object]
    large: float | None
    small: float | None
    speed: float | None = None
    processes: int = 2
    threads: int = 1

    def run(self, size: Size, output: Path) -> RunConfig:
        replicas = 2 if {"Distributed.dp_degree", f"{SHARDING}.sharding_degree"} & set(self.keys) else 1
        micro = size.batch // replicas // self.micro_batches
        return config(size, output, **{"Global.micro_batch_size": micro, "Engine.logging_freq": 1, **self.keys})


def sharded(stage: int) -> dict[str, object]:
    return {f"{SHARDING}.sharding_degree": 2, f"{SHARDING}.sharding_stage": stage}


ALONE, THREADS = Case(1, {}, None, None, processes=1), Case(1, {}, None, None, processes=1, threads=2)
CASES = {
    # What a pipeline pays for small micro-batches, without a pipeline.
    "one process, 2 threads, 8 micro-batches": THREADS._replace(micro_batches=8),
    "dp2": Case(1, {"Distributed.dp_degree": 2}, 1.20, 1.08, 0.97),
    "sharding2 stage 1": Case(1, sharded(1), 1.24, 1.27, 0.92),  # those of stage 2, which sends no less
    "sharding2 stage 2": Case(1, sharded(2), 1.24, 1.27, 0.92),
    "sharding2 stage 3": Case(1, sharded(3), 1.32, 1.41, 0.88),
    "mp2": Case(1, {"Distributed.mp_degree": 2}, 1.16, 1.60, 0.93),
    "mp2 sequence_parallel": Case(1, {"Distributed.mp_degree": 2, "Model.sequence_parallel": True}, 1.40, 2.26),
    "pp2 1F1B, 2 micro-batches": Case(2, {"Distributed.pp_degree": 2}, 1.08, 1.08),
    # In theory 8 of 9 slots are used; 0.05 less.
    "pp2 1F1B, 8 micro-batches": Case(8, {"Distributed.pp_degree": 2}, 1.20, 1.25, 0.84),
    "pp2 interleaved, 8 micro-batches": Case(8, {"Distributed.pp_degree": 2, VIRTUAL: 2}, None, None),
}

SCHEDULES: dict[str, dict[str, object]] = {
    "1F1B": {},
    "interleaved": {VIRTUAL: 2},
    "GPipe": {"Distributed.pp_schedule": "GPipe"},
}
MICRO_BATCHES = (4, 8, 16)
BUBBLES = {
    (2, "1F1B"): (0.30, 0.18, 0.12),
    (2, "interleaved"): (0.21, 0.15, 0.13),
    (2, "GPipe"): (0.33, 0.18, 0.16),
    (4, "1F1B"): (0.86, 0.48, 0.29),
    (4, "interleaved"): (0.59, 0.32, 0.25),
    (4, "GPipe"): (0.88, 0.47, 0.30),
}
FORWARD, BACKWARD = 0.020, 0.040  # seconds of a micro-batch on a rank

TOKENS, HIDDEN, VOCAB = 512, 512, 50304
LOSS_MB = {"all logits": 204, "in chunks": 47}


def forked(world: int, measure: Callable[[Path], Any]) -> Any:
    """What the first of some ranks returns, each of them a fork of this process with one thread."""
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

        def act() -> int:
            value = measure(folder)
            if os.environ["RANK"] == "0":
                (folder / "result").write_text(json.dumps(value))
            return 0

        for rank in range(world):
            environ = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pids.append(fork(act, folder, environ, folder / f"out{rank}", folder / f"err{rank}"))
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(codes), "\n".join((folder / f"err{rank}").read_text() for rank in range(world))
        return json.loads((folder / "result").read_text())


def step_cost(case: Case, size: Size, steps: int) -> Cost:
    """Seconds of a step of the trainer's own loop; CPU seconds of all ranks added up."""

    def measure(folder: Path) -> list[float]:
        torch.set_num_threads(case.threads)
        run = case.run(size, folder / "output")
        with join(run, layout_of(run)) as mesh, output_folder(run, mesh, Log("mingpt", 1), NO_EVENTS) as checkpoints:
            trainer = Ours(run, mesh, checkpoints)
            trainer.steps(1)
            spent = cost(lambda: trainer.steps(steps), steps)
            return [spent.wall, *mesh.total(spent.cpu)]

    return Cost(*forked(case.processes, measure))


def step_costs(size: Size, rounds: int, steps: int, cases: dict[str, Case]) -> dict[str, list[Cost]]:
    """In turns, in an order that rotates."""
    cases = {"alone": ALONE, "threads": THREADS, **cases}
    names, spent = list(cases), {name: list[Cost]() for name in cases}
    for number in range(rounds):
        for name in names[number:] + names[:number]:
            spent[name].append(step_cost(cases[name], size, steps))
    return spent


def report_steps(size: Size, which: str, rounds: int, steps: int) -> None:
    spent = step_costs(size, rounds, steps, CASES)
    alone, threads = spent.pop("alone"), spent.pop("threads")
    milliseconds = [median(c.wall for c in each) * 1e3 for each in (alone, threads)]
    print(
        f"{size}: a step of one process takes {milliseconds[0]:.0f} ms with one thread, {milliseconds[1]:.0f} with two"
    )
    print(
        f"  {'two processes':<40} {'CPU ratio':>9} {'reference':>9} {'wall ratio':>10} {'tokens/s of two threads':>24}"
    )
    for name, mine in spent.items():
        cpu, wall, reference = ratio(mine, alone, "cpu"), ratio(mine, alone, "wall"), getattr(CASES[name], which)
        speed, goal = ratio(threads, mine, "wall"), CASES[name].speed if which == "large" else None
        aim = f"{goal:.2f} wanted" if goal else ""
        print(
            f"  {name:<40} {cpu:>9.2f} {reference or '':>9} {wall:>10.2f} {speed:>9.2f} {aim:>14} {mark(cpu, reference)}",
            flush=True,
        )
        if goal:
            walls = [[1 / c.wall for c in costs] for costs in (mine, threads)]
            record(
                f"{name}, {size}, speed", ours=walls[0], peer=walls[1], unit="steps/s", goal=goal, more_is_better=True
            )
        for what in ("wall", "cpu"):
            each = [[getattr(c, what) for c in costs] for costs in (mine, alone)]
            record(f"{name}, {size}, {what}", ours=each[0], peer=each[1], goal=reference if what == "cpu" else None)


def mark(measured: float, reference: float | None) -> str:
    return "!" if reference and measured > TOLERANCE * reference else ""


class Sleep(torch.autograd.Function):
    """x, and a while later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        time.sleep(FORWARD * share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD * ctx.share)
        return outer[0], None


class SleepingStage(nn.Module):
    """Takes and makes what a part of the GPT does in its place in a pipeline, and a share of a rank's time."""

    def __init__(self, is_first: bool, is_last: bool, hidden: int, share: float) -> None:
        super().__init__()
        self.is_first, self.is_last, self.share = is_first, is_last, share
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, labels: Tensor | None = None, factor: float = 1.0) -> Tensor:
        x = Sleep.apply(x[..., None] * self.weight if self.is_first else x * self.weight, self.share)
        return x.sum() * factor if self.is_last else x


def sleeping_update(run: RunConfig, mesh: Mesh) -> Callable[[], object]:
    """One update by the trainer's own pipeline, and the sum over all ranks that follows it in training."""
    virtual, tokens = run.Model.virtual_pp_degree, run.Data.Train.dataset.max_seq_len
    total = mesh.layout.pp * virtual
    numbers = range(mesh.at.pp, total, mesh.layout.pp)
    stages = [(n, SleepingStage(n == 0, n == total - 1, run.Model.hidden_size, 1 / virtual)) for n in numbers]
    pipeline = Pipeline(run, mesh, Precision(run.Engine.mix_precision, "cpu"), stages)
    text = torch.zeros(run.Global.local_batch_size, tokens, dtype=torch.long)
    return lambda: mesh.total(float(pipeline.gradients(LocalBatch(text, text), 1.0)))


def bubbles(pp: int, cases: list[tuple[str, int]], rounds: int) -> list[float]:
    """Of schedules and micro-batches: T / ideal - 1, where an ideal pipeline has no rank that waits for another.

    The least of some rounds: a neighbour on the machine wakes sleepers late, and never early.
    """

    def measure(folder: Path) -> list[float]:
        runs = []
        for schedule, count in cases:
            size = Size(2 * pp, 16, 2, 16, count)
            keys = {"Distributed.pp_degree": pp, "Global.micro_batch_size": 1, **SCHEDULES[schedule]}
            runs.append(config(size, folder / "output", **keys))
        with join(runs[0], layout_of(runs[0])) as mesh:
            updates = [sleeping_update(run, mesh) for run in runs]
            for update in updates:
                update()
            times = [[cost(update, 1).wall for update in updates] for _ in range(rounds)]
        ideals = [count * (FORWARD + BACKWARD) for _, count in cases]
        return [min(each) / ideal - 1 for each, ideal in zip(zip(*times), ideals)]

    return forked(pp, measure)  # type: ignore[no-any-return]


def report_bubbles(rounds: int) -> None:
    counts = "".join(f"{f'{count} micro-batches':>28}" for count in MICRO_BATCHES)
    print(f"bubbles: measured / theory / reference\n  {'':<16}{counts}")
    for pp in (2, 4):
        cases = [(schedule, count) for schedule in SCHEDULES for count in MICRO_BATCHES]
        measured = dict(zip(cases, bubbles(pp, cases, rounds)))
        for schedule, keys in SCHEDULES.items():
            cells = ""
            for count, reference in zip(MICRO_BATCHES, BUBBLES[pp, schedule]):
                bubble, theory = measured[schedule, count], (pp - 1) / (2 if VIRTUAL in keys else 1) / count
                cells += f"{f'{bubble:.2f} / {theory:.2f} / {reference:.2f}{mark(bubble, reference):>2}':>28}"
            print(f"  {f'pp{pp} {schedule}':<16}{cells}", flush=True)


def loss_in_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked_loss(x, weight, labels, len(weight), 1.0)


def loss_of_all_logits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten(), reduction="sum")


LOSSES = {"all logits": loss_of_all_logits, "in chunks": loss_in_chunks}


def loss_inputs(vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(1, TOKENS, HIDDEN), torch.randn(vocab, HIDDEN).mul_(0.02)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (1, TOKENS))


def loss_memory(name: str) -> float:
    """The megabytes that forward and backward hold at most, beside the inputs and the gradients that come out."""

    def measure(_: Path) -> float:
        # What is freed goes back at once, so that no peak hides in memory kept for later.
        mmap_threshold, mmap_max = -3, -4  # of malloc
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)
        ctypes.CDLL(None).mallopt(mmap_max, 1 << 16)
        LOSSES[name](*loss_inputs(vocab=128)).backward()  # code is loaded, the buffers of matrix products are there
        x, weight, labels = loss_inputs()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        before = peak_mb()
        LOSSES[name](x, weight, labels).backward()
        assert x.grad is not None
        assert weight.grad is not None
        return peak_mb() - before - (x.grad.nbytes + weight.grad.nbytes) / 1e6

    return forked(1, measure)  # type: ignore[no-any-return]


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def loss_time(rounds: int) -> float:
    """CPU seconds in chunks, as a share of those with all logits."""

    def measure(_: Path) -> float:
        inputs = loss_inputs()
        spent: dict[str, list[Cost]] = {name: [] for name in LOSSES}
        for _ in range(rounds):
            for name, loss in LOSSES.items():
                spent[name].append(cost(lambda loss=loss: loss(*inputs).backward(), 1))  # type: ignore[misc]
        return ratio(spent["in chunks"], spent["all logits"], "cpu")

    return forked(1, measure)  # type: ignore[no-any-return]


def report_loss(rounds: int) -> None:
    print(f"loss of {TOKENS} tokens, {HIDDEN} hidden, vocabulary {VOCAB}: forward and backward")
    for name, reference in LOSS_MB.items():
        each = [loss_memory(name) for _ in range(rounds)]
        used = median(each)
        record(f"loss, {name}, memory", ours=each, goal=reference, unit="MB")
        print(
            f"  {name:<12} {used:>6.0f} MB beside inputs and gradients, reference {reference} {mark(used, reference)}"
        )
    print(f"  in chunks it takes {loss_time(rounds):.2f} of the CPU seconds of all logits")


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)  # for the forks; see tests/ranks.py
    if not parts or "steps" in parts:
        report_steps(SMALL, "small", rounds=3, steps=8)
        report_steps(LARGE, "large", rounds=3, steps=2)
    if not parts or "bubbles" in parts:
        report_bubbles(rounds=3)
    if not parts or "loss" in parts:
        report_loss(rounds=3)


if __name__ == "__main__":
    main(sys.argv[1:])
