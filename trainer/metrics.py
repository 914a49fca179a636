"""Log lines in the chosen style, one JSON object per logged step, and the speed of the run."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import torch

from trainer.checkpoint_names import METRICS, RANK_TIMES, REPEATED_METRICS
from trainer.config.sections import RunConfig
from trainer.device import peak_memory
from trainer.durable import replacing
from trainer.estimate import flops_per_token
from trainer.gpu_monitor import gpu_monitor
from trainer.input_files import open_own, parse_object
from trainer.logline import INDENT, RESUMED_FROM, TrainLine, json_line, prefixed, rank_prefix
from trainer.mesh import Mesh
from trainer.records import Records, origin
from trainer.step_times import STEP, Spans, spans_on

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


class Costs(NamedTuple):
    """The mean seconds of a step, and of its parts."""

    step: float
    reader: float
    wait: float  # for other ranks
    optimizer: float

    @property
    def compute(self) -> float:
        """Forward and backward passes."""
        return max(0.0, self.step - self.reader - self.wait - self.optimizer)


class Clock:
    """Times steps and their parts since the last log line, and what the loop waits for in between.

    Evaluation and saving are not a part of any step.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.steps, self.seconds, self.reader = 0, 0.0, 0.0
        self.own_time = 0.0  # of a step, without waiting for other ranks
        self._began = time.perf_counter()
        self._computing: Any = None
        self._stalls: dict[str, float] = {}

    def begin(self) -> None:
        self._began = time.perf_counter()

    def data_is_here(self, is_logged: bool) -> None:
        self.reader += time.perf_counter() - self._began
        # Now, because other ranks are told in this step.
        if is_logged and self.steps:
            costs = self._costs()
            self.own_time = costs.step - costs.wait
        self.spans.begin_step(is_logged)
        self._computing = self.spans.begin()

    def is_computed(self) -> None:
        self.spans.end(STEP, self._computing)

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        self.steps += 1

    @contextmanager
    def stalled(self, name: str) -> Iterator[None]:
        """Time something for which the training loop waits."""
        began = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - began
            self._stalls[name] = self._stalls.get(name, 0.0) + passed

    def read(self) -> Costs:
        """The costs since the last call; starts the next interval."""
        costs = self._costs()
        self.steps, self.seconds, self.reader = 0, 0.0, 0.0
        self.spans.reset()
        return costs

    def _costs(self) -> Costs:
        steps, shares = max(1, self.steps), self.spans.shares()
        step, reader = self.seconds / steps, self.reader / steps
        with_data = max(0.0, step - reader)
        return Costs(step, reader, shares.wait * with_data, shares.optimizer * with_data)

    def read_stalls(self) -> dict[str, float]:
        """Seconds since the last call by name."""
        stalls, self._stalls = self._stalls, {}
        return stalls


class Metrics:
    """Writes the train line and `metrics.jsonl` from what was measured."""

    on_record: Callable[[dict[str, Any]], None] = staticmethod(lambda fields: None)  # tracking.py

    def __init__(self, run: RunConfig, mesh: Mesh, log: Log, folder: Path, max_steps: int) -> None:
        self.log, self.device, self.world = log, mesh.device, mesh.world
        # The first rank is enough: all ranks know the same global numbers.
        self.records = Records(folder / METRICS, "metrics are", log.warn) if mesh.is_first else None
        self.rank_times = (
            Records(folder / RANK_TIMES, "step times are", log.warn)
            if mesh.is_first and mesh.world > 1
            else None
        )
        self.tokens_per_sample = run.Data.Train.dataset.max_seq_len
        self.tokens_per_step = run.Global.global_batch_size * run.Data.Train.dataset.max_seq_len
        self.flops_per_token = flops_per_token(run)
        self.peak = peak_flops(mesh.device, run.Engine.mix_precision.enable)
        self.max_steps = max_steps  # in epoch mode only the trainer knows it
        self.clock = Clock(spans_on(mesh.device))
        self.job = origin().get("job")
        self.gpu = gpu_monitor(mesh.device) if mesh.is_first else None

    def logged(
        self,
        step: int,
        epoch: int,
        batch: int,
        loss: float,
        lr: float,
        norm: float,
        scale: float,
        samples: int = 0,
    ) -> None:
        costs = self.clock.read()
        rate = self.tokens_per_step / costs.step
        line = TrainLine(
            step,
            epoch,
            batch,
            loss,
            costs.reader,
            costs.step,
            1 / costs.step,
            rate,
            rate / self.world,
            lr,
        )
        # Model FLOPs utilization: recomputation does not count as useful work.
        mfu = rate / self.world * self.flops_per_token / self.peak if self.peak else None
        fields = {
            "step": step,
            "max_steps": self.max_steps,
            "epoch": epoch,
            "samples": samples,
            "tokens": samples * self.tokens_per_sample,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "loss_scale": scale,
            "tokens_per_second": round(rate, 1),
            "step_time": round(costs.step, 6),
            "reader_time": round(costs.reader, 6),
            "compute_time": round(costs.compute, 6),
            "wait_time": round(costs.wait, 6),
            "optimizer_time": round(costs.optimizer, 6),
            **{f"{name}_time": round(value, 3) for name, value in self.clock.read_stalls().items()},
            "memory": peak_memory(self.device),
            "mfu": mfu and round(mfu, 4),
            **(self.gpu.read() if self.gpu else {}),
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
                open(self.file.with_name(REPEATED_METRICS), "ab", opener=open_own) as repeated,
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
        return is_later and record.get("job") == self.job

    @property
    def file(self) -> Path | None:
        """None if this rank does not record, or could not."""
        return self.records.file if self.records else None

    def record(self, fields: dict[str, Any]) -> None:
        self.on_record(fields)
        if self.records:
            self.records.add(fields)

    def record_rank_times(self, step: int, seconds: Sequence[float]) -> None:
        """Record what each rank needed for a step: the slowest one holds up all others."""
        if self.rank_times:
            own = [round(1000 * value, 2) for value in seconds]
            self.rank_times.add({"step": step, "own_ms": own})


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
