"""How fast a step is: `python tests/bench/training.py` (or `make bench`), about six minutes on two cores.

Everything is a ratio of two things measured in turns in one run, since machines are noisy. CPU seconds are those of all
threads (user + system); wall seconds are shown beside them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.program import configure_threads

configure_threads()

import torch
import torch.nn.functional as F

from tests.bench.recorder import record
from trainer.checkpoint import Checkpoints
from trainer.config import Override, load
from trainer.config.sections import RunConfig
from trainer.data import Length
from trainer.device import choose_device
from trainer.estimate import flops_per_token
from trainer.events import NO_EVENTS
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.metrics import Log, peak_flops
from trainer.model import build_model
from trainer.resume import output_folder
from trainer.stop import StopRequest
from trainer.train import Training, prepare, run_steps


class Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    block: int
    batch: int

    def __str__(self) -> str:
        return f"{self.layers}×{self.hidden}, block {self.block}, batch {self.batch}"


SMALL, LARGE, THIRD = Size(4, 128, 4, 64, 12), Size(8, 512, 8, 128, 16), Size(6, 384, 6, 256, 8)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
SHOWN = 12  # operations of a profile
CPU = torch.device("cpu")


class Cost(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float


def config(size: Size, output: Path, **more: object) -> RunConfig:
    keys = {
        "Global.device": "cpu",
        "Global.global_batch_size": size.batch,
        "Global.micro_batch_size": size.batch,
        "Engine.eval_freq": 0,
        "Engine.eval_iters": 0,
        "Engine.save_load.save_steps": 0,
        "Engine.save_load.output_dir": output,
        "Model.name": "GPT",
        "Model.num_layers": size.layers,
        "Model.hidden_size": size.hidden,
        "Model.num_attention_heads": size.heads,
        "Model.hidden_dropout_prob": 0,
        "Model.attention_probs_dropout_prob": 0,
        "Data.Train.dataset.name": "CharDataset",
        "Data.Train.dataset.path": "builtin",
        "Data.Train.dataset.max_seq_len": size.block,
        **more,
    }
    return load(None, [Override.parse(f"{key}={value}") for key, value in keys.items()]).run


class Ours:
    """The trainer's own loop, logging every step, a few steps at a time."""

    def __init__(self, run: RunConfig, mesh: Mesh, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        with open(os.devnull, "w") as nowhere:
            self.training: Training = prepare(run, mesh, Log("fleetx", mesh.rank, nowhere), StopRequest(), NO_EVENTS)
        self.training.log.stream = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives

    def steps(self, count: int) -> None:
        self.training.length = Length(self.training.progress.step + count, self.training.length.steps_per_epoch)
        run_steps(self.training, self.checkpoints)


class Bare:
    """Forward, backward and fused AdamW on the same modules, nothing else: the data is already there."""

    def __init__(self, run: RunConfig) -> None:
        self.model, self.vocab = build_model(run.Model, 1, CPU), run.Model.vocab_size
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        shape = (run.Global.global_batch_size, run.Data.Train.dataset.max_seq_len + 1)
        self.tokens = torch.randint(0, self.vocab or 0, shape)

    def steps(self, count: int) -> None:
        for _ in range(count):
            logits = self.model(self.tokens[:, :-1])[..., : self.vocab]
            F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
            self.adam.step()
            self.adam.zero_grad()


def cost(action: Callable[[], Any], steps: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


@contextlib.contextmanager
def ours(size: Size, **more: object) -> Iterator[Ours]:
    with tempfile.TemporaryDirectory() as folder:
        run = config(size, Path(folder), **more)
        mesh = Mesh(Layout(), 0, 0, choose_device(run, 0))
        with output_folder(run, mesh, Log("mingpt", 1), NO_EVENTS) as checkpoints:
            yield Ours(run, mesh, checkpoints)


def against_bare(size: Size, rounds: int, steps: int) -> tuple[list[Cost], list[Cost], RunConfig]:
    """Our loop and the bare one, in turns."""
    with ours(size) as trainer:
        run = trainer.training.run
        bare = Bare(run)
        trainer.steps(2)
        bare.steps(2)
        mine, plain = [], []
        for _ in range(rounds):
            mine.append(cost(lambda: trainer.steps(steps), steps))
            plain.append(cost(lambda: bare.steps(steps), steps))
    return mine, plain, run


def profile_of(size: Size, steps: int) -> tuple[dict[str, float], float]:
    """Which operation takes which share of a step, and FLOPs per second of matrix products without those of attention."""
    from torch.profiler import profile

    with ours(size) as trainer:
        trainer.steps(1)
        with profile() as profiled:
            trainer.steps(steps)
        weights = sum(
            p.numel()
            for name, p in trainer.training.parallel.parts[0].named_parameters()
            if p.dim() == 2 and "position" not in name
        )
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profiled.key_averages()}
    products = sum(seconds.pop(name, 0.0) for name in PRODUCTS)
    total = products + sum(seconds.values())
    shares = {"products": products / total, **{name: spent / total for name, spent in seconds.items()}}
    return shares, 6 * weights * size.batch * size.block * steps / products


def report_step(size: Size, rounds: int, steps: int) -> None:
    mine, plain, run = against_bare(size, rounds, steps)
    tokens = size.batch * size.block
    wall = median(c.wall for c in mine)
    peak = peak_flops(CPU, in_half=False) or 1.0
    mfu = tokens / wall * flops_per_token(run) / peak
    print(
        f"{size}: {wall * 1e3:.1f} ms, {tokens / wall:.0f} tokens/s, MFU {mfu:.0%} of a measured GEMM peak of {peak / 1e9:.0f} GFLOP/s"
    )
    print(
        f"  against the bare loop: {ratio(mine, plain, 'cpu'):.3f} of its CPU seconds, {ratio(mine, plain, 'wall'):.3f} of its wall time"
    )
    for what in ("wall", "cpu"):
        record(f"step of {size}, {what}", ours=[getattr(c, what) for c in mine], peer=[getattr(c, what) for c in plain])
    shares, rate = profile_of(size, 3)
    record(f"GEMM rate of {size}", ours=[rate], peer=[peak], unit="FLOP/s", goal=0.75, more_is_better=True)
    print(f"  matrix products run at {rate / peak:.0%} of the GEMM peak; shares of a step:")
    for name in sorted(shares, key=lambda name: -shares[name])[:SHOWN]:
        print(f"    {shares[name]:6.1%}  {name}")


def ratio(mine: list[Cost], theirs: list[Cost], what: str) -> float:
    return median(getattr(a, what) / getattr(b, what) for a, b in zip(mine, theirs))


def tokens_per_cpu_second(size: Size, world: int, threads: int, steps: int) -> float:
    """Of some ranks, forked; their CPU seconds added up."""
    from tests.ranks import fork, free_port

    folder = Path(tempfile.mkdtemp())
    port, pids = str(free_port()), []

    def measure(rank: int) -> int:
        from trainer.mesh import join

        torch.set_num_threads(threads)
        run = config(
            size, folder / "output", **{"Distributed.dp_degree": world, "Global.micro_batch_size": size.batch // world}
        )
        with join(run, Layout(dp=world)) as mesh, output_folder(run, mesh, Log("mingpt", 1), NO_EVENTS) as checkpoints:
            trainer = Ours(run, mesh, checkpoints)
            trainer.steps(2)
            spent = cost(lambda: trainer.steps(steps), 1).cpu
            (total,) = mesh.total(spent)
            (folder / "result").write_text(str(steps * size.batch * size.block / total)) if rank == 0 else None
        return 0

    for rank in range(world):
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        pids.append(
            fork(lambda rank=rank: measure(rank), folder, environ, folder / f"out{rank}", folder / f"err{rank}")
        )  # type: ignore[misc]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(codes), (folder / "err0").read_text()
    return float((folder / "result").read_text())


def report_two_processes(size: Size, rounds: int, steps: int) -> None:
    ratios = []
    for _ in range(rounds):
        two = tokens_per_cpu_second(size, 2, 1, steps)
        one = tokens_per_cpu_second(size, 1, 2, steps)
        ratios.append(two / one)
    record(f"tokens per CPU second of two processes, {size}", ours=ratios, unit="of one", more_is_better=True)
    print(f"{size}: two processes reach {median(ratios):.2f} of the tokens per CPU second of one with two threads")


def main() -> None:
    torch.set_num_threads(1)  # for the forks; see tests/ranks.py
    report_two_processes(SMALL, 3, 30)
    report_two_processes(LARGE, 2, 4)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report_step(SMALL, 7, 20)
    report_step(LARGE, 3, 3)
    report_step(THIRD, 3, 4)


if __name__ == "__main__":
    main()
