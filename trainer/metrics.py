"""Log lines in the chosen style, one JSON object per logged step, and the speed of the run."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from trainer.config.sections import RunConfig
from trainer.device import peak_memory
from trainer.durable import replacing
from trainer.estimate import flops_per_token
from trainer.input_files import open_own, parse_object
from trainer.logline import INDENT, RESUMED_FROM, TrainLine, json_line, prefixed, rank_prefix
from trainer.mesh import Mesh

# Dense half-precision peaks in TFLOP/s from the vendors' data sheets; the longest match counts.
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
REPEATED_FILE = "metrics.repeated.jsonl"  # records of steps that were trained again later
LONGEST_LINE = 1 << 20  # bytes of a record; ours have a few hundred
GEMM_SIZE = 768  # large enough to reach a CPU's peak, small enough to take milliseconds


class Log:
    """Writes the log of one rank to stdout. `style` is fleetx, mingpt or json."""

    def __init__(self, style: str, rank: int, stream: TextIO | None = None) -> None:
        self.style, self.rank = style, rank
        stream = stream or sys.stdout  # None if the descriptor is closed
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        # A character that the terminal cannot encode must not stop the run.
        if isinstance(self.stream, TextIOWrapper):
            self.stream.reconfigure(errors="replace")
        self.coloured = self.stream.isatty() and not os.environ.get("NO_COLOR")

    def info(self, text: str) -> None:
        """Log once for the whole job, on the first rank. minGPT's style has no such lines."""
        if self.rank == 0 and self.style != "mingpt":
            self.write(text, "INFO")

    def info_block(self, title: str, lines: Iterable[str]) -> None:
        """Log a long text as one record, once for the whole job.

        Only the title has a prefix, and the lines are indented, so that log viewers can fold it.
        """
        body = "".join(f"\n{INDENT}{line}" for line in lines)
        if self.style == "json":
            self.info(title + body)
        elif self.rank == 0 and self.style != "mingpt":
            self.plain(prefixed(title, "INFO", datetime.now(), self.coloured) + body)

    def warn(self, text: str) -> None:
        self.write(text if self.rank == 0 else rank_prefix(self.rank) + text, "WARNING")

    def plain(self, text: str) -> None:
        """Log without a prefix, as minGPT does."""
        try:
            self.stream.write(f"{text}\n")  # one call: the checkpoint thread logs too
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass  # if the disk is full, lose log lines but keep training

    def write(self, text: str, level: str, **fields: Any) -> None:
        if self.style == "json":
            self.plain(json_line(text, level, self.rank, datetime.now(timezone.utc), fields))
        else:
            for line in text.splitlines():
                self.plain(prefixed(line, level, datetime.now(), self.coloured))


class Clock:
    """Times steps and waiting for data since the last log line, without evaluation and saving."""

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
        """Mean reader and batch cost since the last call; starts the next interval."""
        steps = max(1, self.steps)
        costs = self.reader / steps, self.seconds / steps
        self.steps, self.seconds, self.reader = 0, 0.0, 0.0
        return costs


class Metrics:
    """Writes the train line and `metrics.jsonl` from what was measured."""

    on_record: Callable[[dict[str, Any]], None] = staticmethod(lambda fields: None)  # tracking.py

    def __init__(self, run: RunConfig, mesh: Mesh, log: Log, folder: Path, max_steps: int) -> None:
        self.log, self.device, self.world = log, mesh.device, mesh.world
        # The first rank is enough: all ranks know the same global numbers.
        self.file: Path | None = folder / "metrics.jsonl" if mesh.is_first else None
        self.tokens_per_step = run.Global.global_batch_size * run.Data.Train.dataset.max_seq_len
        self.flops_per_token = flops_per_token(run)
        self.peak = peak_flops(mesh.device, run.Engine.mix_precision.enable)
        self.max_steps = max_steps  # in epoch mode only the trainer knows it
        self.clock = Clock()
        # Several attempts, and jobs that share an output folder, write to the same file.
        job, attempt = (os.environ.get(name, "") for name in ("GPTCTL_JOB", "GPTCTL_ATTEMPT"))
        self.origin = {"job": job, "attempt": int(attempt)} if job and attempt.isdecimal() else {}

    def logged(
        self, step: int, epoch: int, batch: int, loss: float, lr: float, norm: float, scale: float
    ) -> None:
        reader, cost = self.clock.read()
        rate = self.tokens_per_step / cost
        line = TrainLine(
            step, epoch, batch, loss, reader, cost, 1 / cost, rate, rate / self.world, lr
        )
        # Model FLOPs utilization: recomputation does not count as useful work.
        mfu = rate / self.world * self.flops_per_token / self.peak if self.peak else None
        fields = {
            "step": step,
            "max_steps": self.max_steps,
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

    def resume(self, step: int) -> None:
        """Begin after a step: later ones that an earlier attempt recorded are trained again.

        Its records move to another file, so that each step is once in this one. Readers drop them
        too if that fails, for example on a full disk.
        """
        if self.file is None or not self.file.exists():
            return
        try:
            self._set_aside_after(step)
        except OSError as error:
            self.log.warn(f"cannot rewrite {self.file} ({error.strerror}): it has steps twice")
        self.record({RESUMED_FROM: step})

    def _set_aside_after(self, step: int) -> None:
        assert self.file
        with open(self.file, "rb", opener=open_own) as stream:
            if self._is_foreign(stream):
                self._rename_foreign()
                return
            if not any(self._is_after(line, step) for line in stream):
                return
            stream.seek(0)
            # The inner file is closed first: if the run is killed in between, no record is lost.
            with (
                replacing(self.file) as kept,
                open(self.file.with_name(REPEATED_FILE), "ab", opener=open_own) as repeated,
            ):
                for line in stream:
                    (repeated if self._is_after(line, step) else kept).write(line)

    def _is_foreign(self, stream: BinaryIO) -> bool:
        """Whether a line is longer than any of ours. Leaves the stream at its start."""
        # A damaged file can have any size: its lines are not read as a whole before this.
        while line := stream.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                return True
        stream.seek(0)
        return False

    def _rename_foreign(self) -> None:
        assert self.file
        names = (f"{self.file.name}.foreign{number}" for number in itertools.count(1))
        asides = (self.file.with_name(name) for name in names)
        aside = next(each for each in asides if not os.path.lexists(each))
        self.file.rename(aside)
        reason = f"has a line of more than {LONGEST_LINE >> 20} MiB"
        self.log.warn(f"{self.file} {reason}: renamed to {aside.name}")

    def _is_after(self, line: bytes, step: int) -> bool:
        """Whether a record is of a later step and of this job: others may use the folder too."""
        try:
            record = parse_object(line)
            is_later = record.get("step", 0) > step
        except (ValueError, TypeError):
            return not line.endswith(b"\n")  # killed while it was written
        return is_later and record.get("job") == self.origin.get("job")

    def record(self, fields: dict[str, Any]) -> None:
        self.on_record(fields)
        if self.file is None:
            return
        # JSON has no nan and inf.
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        fields |= {"time": round(time.time(), 3), **self.origin}
        try:
            # Opened for every line, so that nothing stays in a buffer if the run is killed.
            # A FIFO would block the training, and a link lead to another file.
            with open(self.file, "a", encoding="utf-8", opener=open_own) as stream:
                stream.write(json.dumps(fields) + "\n")
        except OSError as error:  # a full disk must not stop the run
            self.log.warn(
                f"cannot write {self.file} ({error.strerror}): metrics are no longer recorded"
            )
            self.file = None


def peak_flops(device: torch.device, in_half: bool) -> float | None:
    """The peak FLOP/s of this device: the vendor's number for a GPU, measured on a CPU."""
    if device.type == "cuda" and not in_half:
        return None  # the fp32 peak depends on whether TF32 is enabled
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [gpu for gpu in GPU_PEAKS if gpu in name]
        return GPU_PEAKS[max(known, key=len)] * 1e12 if known else None
    a, b = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    torch.mm(a, b)  # warm-up: the first product starts threads and allocates memory
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * GEMM_SIZE**3 / min(seconds)  # the fastest try: others were disturbed
