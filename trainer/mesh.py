"""Who this process is among the others: device, rank, process groups. The only module that makes process groups."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.sections import RunConfig
from trainer.errors import OUT_OF_REACH, UserError
from trainer.layout import Layout, Machines

PATIENCE = 15.0  # seconds after which a rank says what it waits for
_START = "start it with torchrun, or unset RANK, WORLD_SIZE and the like"


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    rank: int
    local_rank: int
    device: torch.device
    cpu_group: dist.ProcessGroup | None = None  # beside that of the training loop: for checkpoints, and for objects

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    def total(self, *numbers: float) -> list[float]:
        """Each number, summed over all ranks."""
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return values.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank; for small things outside of the training loop."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def on_first(self, action: Callable[[], None]) -> None:
        """Done by the first rank alone. Its mistake is everybody's: no rank waits for one that is gone."""
        mistake = None
        try:
            if self.is_first:
                action()
        except UserError as error:
            mistake = (error.message, error.hint)
        mistake = self.gather(mistake)[0]
        if mistake:
            raise UserError(*mistake)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.cpu_group)


def machines(environ: Mapping[str, str] = os.environ) -> Machines:
    """The world that the launcher made, from the variables it sets."""
    world = _number(environ, "WORLD_SIZE", 1)
    local = _number(environ, "LOCAL_WORLD_SIZE", world)
    rank = _number(environ, "RANK", 0)
    if rank >= world or local > world:
        message = f"RANK={rank} and LOCAL_WORLD_SIZE={local} do not fit WORLD_SIZE={world}"
        raise UserError(message, _START)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world > 1 and missing:
        raise UserError(f"WORLD_SIZE={world}, but {missing[0]} is not set", _START)
    return Machines(world // local, local) if world % local == 0 else Machines(1, world)


@contextmanager
def join(run: RunConfig, layout: Layout, environ: Mapping[str, str] = os.environ) -> Iterator[Mesh]:
    """Joins the process group and leaves it at a good end; one process alone needs none."""
    rank, local_rank = _number(environ, "RANK", 0), _number(environ, "LOCAL_RANK", 0)
    device = _device(run, local_rank)
    if layout.world == 1:
        yield Mesh(layout, rank, local_rank, device)
        return
    timeout = timedelta(minutes=run.Distributed.timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if run.Distributed.backend == "nccl" else "gloo"
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    waiting = threading.Timer(PATIENCE, _say_waiting, [f"rank {rank} waits for {layout.world} ranks at {where}"])
    waiting.daemon = True
    waiting.start()
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        message = f"the ranks did not meet at {where}: {str(error).splitlines()[0]}"
        raise UserError(
            message, "check that all of them were started, and that the port is free", OUT_OF_REACH
        ) from None
    finally:
        waiting.cancel()
    yield Mesh(layout, rank, local_rank, device, cpu_group=dist.new_group(backend="gloo", timeout=timeout))
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


def _device(run: RunConfig, local_rank: int) -> torch.device:
    if run.Global.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError(
            "Global.device: gpu, but torch sees no GPU here",
            "use Global.device: cpu, or check CUDA_VISIBLE_DEVICES, the driver, and that torch is built for CUDA",
        )
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: torch sees {count} of them",
            f"start at most {count} ranks on this node, or make more devices visible",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A number of ranks, or one of them."""
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or (name.endswith("SIZE") and int(text) == 0):
        raise UserError(f"{name}={text} makes no sense", _START)
    return int(text)


def _say_waiting(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
