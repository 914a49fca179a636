"""What a run says: log lines in the chosen style, one JSON object per logged step, and how fast it goes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import torch

from trainer.config.sections import RunConfig
from trainer.device import peak_memory
from trainer.estimate import flops_per_token
from trainer.logline import TrainLine, prefixed
from trainer.mesh import Mesh

# Dense half-precision peaks in TFLOP/s, as the vendors state them; the longest matching name counts.
GPU_PEAKS = {
    "V100": 125,
    "A100": 312,
    "A800": 312,
    "A10": 125,
    "H100": 989,
    "H800": 989,
    "H200": 989,
    "B200": 2250,
}
GPU_PEAKS |= {"L40": 181, "L4": 121, "T4": 65, "RTX 4090": 165, "RTX 3090": 71}
GEMM_SIZE = 768


class Log:
    """The text of one rank, on stdout. `style` is fleetx, mingpt or json."""

    def __init__(self, style: str, rank: int, stream: TextIO | None = None) -> None:
        self.style, self.rank = style, rank
        self.stream = stream or sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stdout is closed
        if isinstance(self.stream, TextIOWrapper):
            self.stream.reconfigure(
                errors="replace"
            )  # a terminal that knows ASCII only must not end a run
        self.coloured = self.stream.isatty() and not os.environ.get("NO_COLOR")

    def info(self, text: str) -> None:
        """Said once for the whole job, by the first rank; minGPT's log has no such lines."""
        if self.rank == 0 and self.style != "mingpt":
            self.write(text, "INFO")

    def warn(self, text: str) -> None:
        self.write(text if self.rank == 0 else f"rank {self.rank}: {text}", "WARNING")

    def plain(self, text: str) -> None:
        """minGPT's lines have no prefix."""
        try:
            self.stream.write(f"{text}\n")  # in one piece: the thread that saves writes too
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass  # a full disk costs log lines, not the run

    def write(self, text: str, level: str, **fields: Any) -> None:
        if self.style == "json":
            moment = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            self.plain(
                json.dumps(
                    {"time": moment, "level": level, "rank": self.rank, "message": text, **fields}
                )
            )
        else:
            for line in text.splitlines():
                self.plain(prefixed(line, level, datetime.now(), self.coloured))


class Clock:
    """Seconds of the steps since the last log line, and those of waiting for data; evaluation and saving left out."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.reader = 0, 0.0, 0.0
        self._began = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def data_is_here(self) -> None:
        self.reader += time.perf_counter() - self._began

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        self.steps += 1

    def read(self) -> tuple[float, float]:
        """Mean reader and batch cost of the interval, which ends here."""
        steps = max(1, self.steps)
        costs = self.reader / steps, self.seconds / steps
        self.steps, self.seconds, self.reader = 0, 0.0, 0.0
        return costs


class Metrics:
    """Turns what is measured into the train line and into `metrics.jsonl`."""

    def __init__(self, run: RunConfig, mesh: Mesh, log: Log, folder: Path) -> None:
        self.log, self.device, self.world = log, mesh.device, mesh.world
        self.file: Path | None = folder / "metrics.jsonl" if mesh.is_first else None
        self.tokens_per_step = run.Global.global_batch_size * run.Data.Train.dataset.max_seq_len
        self.flops_per_token = flops_per_token(run)
        self.peak = peak_flops(mesh.device, run.Engine.mix_precision.enable)
        self.clock = Clock()

    def logged(
        self, step: int, epoch: int, batch: int, loss: float, lr: float, norm: float, scale: float
    ) -> None:
        reader, cost = self.clock.read()
        rate = self.tokens_per_step / cost
        line = TrainLine(
            step, epoch, batch, loss, reader, cost, 1 / cost, rate, rate / self.world, lr
        )
        mfu = rate / self.world * self.flops_per_token / self.peak if self.peak else None
        fields = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "loss_scale": scale,
            "tokens_per_second": round(rate, 1),
            "step_time": round(cost, 6),
            "reader_time": round(reader, 6),
            "memory": peak_memory(self.device),
            "mfu": mfu and round(mfu, 4),
        }
        if self.log.rank == 0 and self.log.style != "mingpt":
            self.log.write(str(line), "INFO", **(fields if self.log.style == "json" else {}))
        self.record(fields)

    def record(self, fields: dict[str, Any]) -> None:
        if self.file is None:
            return
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        try:
            with open(self.file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(fields) + "\n")
        except OSError as error:  # a full disk must not end a run
            self.log.warn(f"{self.file} cannot be written ({error.strerror}): no more metrics")
            self.file = None


def peak_flops(device: torch.device, in_half: bool) -> float | None:
    """What this device could do at best, per second: the vendor's number on a GPU, a measured product on a CPU."""
    if device.type == "cuda" and not in_half:
        return None  # it depends on TF32, which is not ours to guess
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [gpu for gpu in GPU_PEAKS if gpu in name]
        return GPU_PEAKS[max(known, key=len)] * 1e12 if known else None
    a, b = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    torch.mm(a, b)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * GEMM_SIZE**3 / min(seconds)
