"""Records the steps of `Profiler.scheduler` with torch's profiler, and writes what it recorded.

Imported only if `Profiler.enable` is set, so a run without it pays nothing. Every rank writes a
chrome trace, and on GPUs a snapshot of its memory; the first rank logs a table of operators.
Nothing that fails here stops the training. `trace_files.py` says where the files are.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.data import LocalBatch
from trainer.durable import sync_folder
from trainer.resume import output_dir
from trainer.state import Training
from trainer.trace_files import MEMORY, TRACE, TraceName, attempt_folder, profiler_folder

STEP = "ProfilerStep#"  # the name by which other tools find the steps in a trace
TOP = 20  # operators in the table
EVERY = -1  # with `detailed`: all of them
LAST_KEY = b'"traceName"'  # what the writer of torch ends a trace with
TAIL = 8192  # bytes at the end of a trace that contain it
MOST_ALLOCATIONS = 1_000_000  # of the memory snapshot; older ones are dropped


class Recorder:
    """Records a range of steps, counted over all attempts of a run, from 1."""

    def __init__(self, t: Training) -> None:
        first, end = t.run.Profiler.scheduler
        # Steps that an earlier attempt has trained are over, and the run may end before the last.
        self.steps = range(max(first, t.progress.step + 1), min(end, t.length.max_steps + 1))
        folder = profiler_folder(str(output_dir(t.run)), t.run.Profiler.profiler_log)
        self.folder = attempt_folder(Path(folder), os.environ)
        self._t, self._recorded = t, range(0)  # steps that are recorded and not written yet
        self._profile: profile | None = None
        self._mark: record_function | None = None

    def __enter__(self) -> Recorder:
        if not self.steps:
            t, wanted = self._t, list(self._t.run.Profiler.scheduler)
            t.log.info(
                f"Profiler: nothing to record: Profiler.scheduler is {wanted}, and this run trains "
                f"steps {t.progress.step + 1} to {t.length.max_steps}."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._write()  # of a run that ended, or was asked to stop, within the range
        elif self._t.mesh.world == 1:
            # Otherwise the process crashes when it exits. Several ranks exit without clean-up: to
            # stop, the profiler would wait for the GPU, and that for a rank that has exited.
            with suppress(Exception):
                self.stop()

    def batches(self, batches: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
        """Pass the batches on. A step lasts until the next batch is asked for."""
        if self.steps:
            for step in range(self._t.progress.step + 1, self.steps.stop):
                self._begin(step)
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
            self.stop()
            self._write()
            self._t.metrics.clock.begin()  # writing is not a part of the next step
        yield from batches

    def _begin(self, step: int) -> None:
        self._end_mark()
        if step == self.steps.start:
            self._start()
        if self._profile is not None:
            self._mark = record_function(f"{STEP}{step}")
            self._mark.__enter__()

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _start(self) -> None:
        log = self._t.log
        with self._warning("record a profile"):
            # Now, not when it is written: a folder that cannot be used is known before the work.
            self.folder.mkdir(parents=True, exist_ok=True)
            log.info(f"Profiler: recording steps {self.steps.start} to {self.steps.stop - 1}.")
            self._profile = start_profile(self._t.mesh.device, self._t.run.Profiler.detailed)
        # Ranks take seconds to prepare, some longer than others: the first step must not show it.
        self._t.mesh.total(0.0)
        self._t.metrics.clock.begin()

    def stop(self) -> None:
        """Stop recording, if that has begun and not ended. All ranks come here at the same step."""
        last = min(self._t.progress.step, self.steps.stop - 1)
        if self.steps and last >= self.steps.start:
            self._recorded = range(self.steps.start, last + 1)
        self.steps = range(0)
        self._end_mark()
        if self._profile is not None and self._recorded:
            facts = self._facts(self._recorded[0], self._recorded[-1])
            with self._warning("stop the profiler"):
                self._profile.add_metadata_json("gptctl", json.dumps(facts))
                self._profile.stop()

    def _write(self) -> None:
        """Write what was recorded, if that has not been done."""
        steps, self._recorded = self._recorded, range(0)
        recorded, self._profile = self._profile, None
        if not steps:
            return
        # On all ranks, also on one that could not record: the watchdog compares the numbers.
        self._t.mesh.heartbeat.tick(f"writing the profile of steps {steps[0]} to {steps[-1]}")
        if recorded is not None:
            with self._warning("write the profile"):
                self._write_files(recorded, steps[0], steps[-1])

    def _write_files(self, recorded: profile, first: int, last: int) -> None:
        rank, is_on_gpu = self._t.mesh.rank, self._t.mesh.device.type == "cuda"
        if is_on_gpu:
            with self._warning("write the memory snapshot"):
                write_memory(self.folder / str(TraceName(rank, first, last, MEMORY)))
        # The table before the file: a full disk must not lose it.
        if self._t.mesh.is_first:
            title = f"Profiler: operators of steps {first} to {last}, rank 0"
            for name, lines in tables(recorded, is_on_gpu, self._t.run.Profiler.detailed):
                self._t.log.info_block(f"{title}, {name}", lines)
        write_trace(recorded, self.folder / str(TraceName(rank, first, last, TRACE)))
        what = os.environ.get("GPTCTL_JOB") or self.folder
        self._t.log.info(
            f"Profiler: the traces of all ranks are in {self.folder}. For a summary, run gptctl "
            f"trace {what}; to see the timeline, open them in ui.perfetto.dev."
        )

    def _facts(self, first: int, last: int) -> dict[str, Any]:
        mesh = self._t.mesh
        layout = {axis: getattr(mesh.layout, axis) for axis in ("dp", "sharding", "pp", "mp")}
        return {"rank": mesh.rank, "world": mesh.world, "steps": [first, last], **layout}

    @contextmanager
    def _warning(self, action: str) -> Iterator[None]:
        """Turn what fails into a warning: a profile is never worth the training."""
        try:
            yield
        except OSError as error:
            where = error.filename or self.folder
            self._t.log.warn(f"cannot {action}: {where}: {error.strerror or error}")
        except Exception as error:  # of torch's profiler, which raises many kinds
            self._t.log.warn(f"cannot {action}: {str(error) or type(error).__name__}")


def start_profile(device: torch.device, detailed: bool) -> profile:
    # Kineto reports its start and stop on stderr, as if something were wrong.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # Shapes and allocations cost time in every operator.
    started = profile(activities=activities, record_shapes=detailed, profile_memory=detailed)
    if on_gpu:
        # Only the stacks of Python: those of C++ take minutes to resolve.
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")
    started.start()
    return started


def tables(recorded: profile, is_on_gpu: bool, detailed: bool) -> Iterator[tuple[str, list[str]]]:
    """The tables of operators that are logged, each with its name."""
    own = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
    averages = recorded.key_averages()
    yield f"the {TOP} longest", _table(averages, own, TOP)
    if not detailed:
        return
    yield "all by their own time", _table(averages, own, EVERY)
    totals = ("device_time_total", "cpu_time_total") if is_on_gpu else ("cpu_time_total",)
    memory = "self_device_memory_usage" if is_on_gpu else "self_cpu_memory_usage"
    for order in (*totals, memory):
        yield f"all by {order}", _table(averages, order, EVERY)
    shapes = recorded.key_averages(group_by_input_shape=True)
    yield "all by input shapes", _table(shapes, own, EVERY)


def _table(averages: Any, order: str, rows: int) -> list[str]:
    text = averages.table(sort_by=order, row_limit=rows)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def write_trace(recorded: profile, file: Path) -> None:
    """Write a chrome trace: complete under its name, or not at all. Raises OSError."""
    part = f"{file.name}.part"
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # By descriptor: Kineto changes backslashes in a path, and does not escape it in the file.
        recorded.export_chrome_trace(f"/proc/self/fd/{folder}/{part}")
        # It also says nothing if it fails: then its file is missing, or has no end.
        _require_end(file.with_name(part), file)
        os.replace(part, file.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        for name in (part, f"{part}.tmp"):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        os.close(folder)
    sync_folder(file.parent)


def _require_end(part: Path, file: Path) -> None:
    incomplete = OSError(errno.EIO, "not written completely; is the disk full?", str(file))
    try:
        stream = open(part, "rb")  # noqa: SIM115 (the next line closes it)
    except FileNotFoundError:
        raise incomplete from None
    with stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(max(0, size - TAIL))
        end = stream.read().rstrip()
        if LAST_KEY not in end or not end.endswith(b"}"):
            raise incomplete
        os.fsync(stream.fileno())


def write_memory(file: Path) -> None:
    """Write what the GPU's memory was used for, for pytorch.org/memory_viz. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    try:
        torch.cuda.memory._dump_snapshot(str(part))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
        torch.cuda.memory._record_memory_history(enabled=None)
