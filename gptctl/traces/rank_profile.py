"""Summarise the trace of one rank: how long its steps took, and what the time was spent on.

Every moment of the steps counts once. On GPUs it counts for what the GPU does, on CPUs for the
operator that runs: attention first, then matrix products, then other operators. Communication
counts only while nothing is computed; the rest is a gap, in which the host does something else.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from gptctl.engine.file_reading import DamagedFile, is_whole
from gptctl.engine.rank_owners import HIGHEST_RANK
from gptctl.traces.intervals import Spans, Union, length, merge, without
from gptctl.traces.trace_reader import Event, Read, TraceReader

ATTENTION, MATMUL, OTHER = "attention", "matrix_products", "other_operators"
COMMUNICATION, GAPS = "communication", "host_gaps"
KINDS = (MATMUL, ATTENTION, OTHER, COMMUNICATION, GAPS)  # in the order of tables
CALL = "communication call"  # the host is inside of it, so it computes nothing meanwhile
# Who wins if several run at the same time. bmm within attention counts as attention.
PRIORITY = (ATTENTION, MATMUL, CALL, OTHER, COMMUNICATION)

MOST_EVENTS = 50_000_000  # of one trace
MOST_STEPS = 100_000
MOST_NAMES = 4096  # of operators or kernels whose kind is kept; a trace has a few hundred
LONGEST_NAME = 500  # characters of a name that are looked at; templates in C++ are long
LARGEST_TIME = 1e17  # microseconds: three thousand years
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")

_STEP = re.compile(r"ProfilerStep#(\d{1,12})", re.ASCII)
_COMMUNICATION = re.compile(
    r"(c10d|_?c10d_functional)::|(gloo|nccl|mpi|ucc|shared):|record_param_comms"
)
_ATTENTION = re.compile(
    r"scaled_dot_product|ScaledDotProduct|flash|fmha|attention|sdpa", re.IGNORECASE
)
_HOST_MATMUL = re.compile(
    r"(aten|mkldnn|onednn|mkl)::_?(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|linear_pointwise"
    r"|mkl_linear|mkldnn_linear|addmm_activation|scaled_mm|int_mm|mv|addmv|dot|grouped_mm)_?"
)
_DEVICE_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|matmul|xmma|wgmma|nvjet|_mm_|splitK", re.IGNORECASE
)
# They only contain other operators, or wait: what they contain is counted by itself.
_CONTAINER = re.compile(r"autograd::|torch::autograd::")
_COMPILED = "## Call CompiledFxGraph"  # its C++ kernels have no events of their own


class RankProfile(NamedTuple):
    """What the trace of one rank says. Times are seconds."""

    rank: int
    file: str
    steps: dict[int, float]  # the duration of every step, by its number
    seconds: float  # of all steps; without steps, of the whole trace
    parts: dict[str, float]  # of `seconds`, by KINDS
    all_communication: float  # also what is hidden behind computation
    on_gpu: bool
    events: int
    invalid: int  # events without the fields that the format requires
    world: int = 0  # how many ranks the run had; 0: unknown

    @property
    def step_time(self) -> float:
        return self.seconds / max(1, len(self.steps))

    @property
    def own_time(self) -> float:
        """Seconds per step without waiting for others. The others wait for the slowest rank."""
        own = self.seconds - self.parts[COMMUNICATION]
        # Never 0, for whoever divides by it: a trace may have nothing but communication.
        return max(own, self.seconds * 1e-9) / max(1, len(self.steps))

    def shares(self) -> dict[str, float]:
        """The parts of the time, which add up to 1."""
        return {kind: self.parts[kind] / self.seconds for kind in KINDS}

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "file": self.file,
            "device": "gpu" if self.on_gpu else "cpu",
            "steps": [{"step": step, "seconds": took} for step, took in self.steps.items()],
            "step_time": self.step_time,
            "own_time": self.own_time,
            "shares": self.shares(),
            "all_communication": self.all_communication / self.seconds,
            "events": self.events,
            "invalid_events": self.invalid,
        }


def read_profile(file: Path, rank: int, done: Read = lambda size: None) -> RankProfile:
    """Summarise a trace; raise OSError or DamagedFile."""
    reader, collected = TraceReader(file, done), _Collected()
    for event in reader.events():
        collected.add(event)
    return collected.profile(rank, str(file))._replace(world=_world_in(reader.facts))


def _world_in(facts: dict[str, Any]) -> int:
    """The number of ranks that the trainer has written into the trace; 0 if it is not there."""
    own = facts.get("gptctl")
    world = own.get("world") if isinstance(own, dict) else None
    return world if is_whole(world, 1, HIGHEST_RANK + 2) else 0


class _Collected:
    """What is kept of the events of a trace."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[float, float]] = {}
        self._host = {kind: Union() for kind in PRIORITY}
        self._device = {kind: Union() for kind in PRIORITY}
        self._counts: Counter[str] = Counter()

    def add(self, event: Event) -> None:
        self._counts["events"] += 1
        if self._counts["events"] > MOST_EVENTS:
            raise DamagedFile(f"more than {MOST_EVENTS:,} events: record fewer steps")
        if event.get("ph") != "X":  # complete events are the only ones with a duration
            return
        span, name = _span_of(event), event.get("name")
        if span is None or not isinstance(name, str):
            self._counts["invalid"] += 1
        elif event.get("cat") in ON_DEVICE:
            self._counts["device"] += 1
            self._device[device_kind(name[:LONGEST_NAME])].add(*span)
        elif event.get("cat") in ON_HOST:
            self._add_host(name[:LONGEST_NAME], span)

    def _add_host(self, name: str, span: tuple[float, float]) -> None:
        if step := _STEP.fullmatch(name):
            if len(self._steps) < MOST_STEPS:
                self._steps[int(step[1])] = span
        elif kind := host_kind(name):
            self._host[kind].add(*span)

    def profile(self, rank: int, file: str) -> RankProfile:
        on_gpu = self._counts["device"] > 0
        found = {
            kind: each.spans() for kind, each in (self._device if on_gpu else self._host).items()
        }
        window = self._window(found)
        seconds = length(window) / 1e6
        if not seconds:
            raise DamagedFile("it has no operators")
        communication = merge([*found[COMMUNICATION], *found[CALL]])
        return RankProfile(
            rank,
            file,
            {step: (end - start) / 1e6 for step, (start, end) in sorted(self._steps.items())},
            seconds,
            parts_of(window, found),
            (seconds - length(without(window, communication)) / 1e6),
            on_gpu,
            self._counts["events"],
            self._counts["invalid"],
        )

    def _window(self, found: dict[str, Spans]) -> Spans:
        if self._steps:
            return merge(self._steps.values())
        # A trace of another program may have no steps: from the first operator to the last.
        every = [span for spans in found.values() for span in (spans[:1] + spans[-1:])]
        if not every:
            return []
        return [(min(start for start, _ in every), max(end for _, end in every))]


def parts_of(window: Spans, found: dict[str, Spans]) -> dict[str, float]:
    """Seconds of the window by kind: every moment counts once, for the first kind of PRIORITY."""
    parts, left = dict.fromkeys(KINDS, 0.0), window
    for kind in PRIORITY:
        rest = without(left, found[kind])
        parts[COMMUNICATION if kind == CALL else kind] += (length(left) - length(rest)) / 1e6
        left = rest
    parts[GAPS] = length(left) / 1e6
    return parts


@lru_cache(MOST_NAMES)
def host_kind(name: str) -> str | None:
    """What an event of the host is; None if it says nothing about the time."""
    if _COMMUNICATION.match(name):
        # `gloo:all_reduce` lasts until it is complete, `c10d::allreduce_` until it is started.
        # `shared:all_reduce` contains the sums of an exchange in shared memory.
        return CALL if "::" in name or name.startswith("shared:") else COMMUNICATION
    if _HOST_MATMUL.fullmatch(name):
        return MATMUL
    if "::" in name and not _CONTAINER.match(name):
        return ATTENTION if _ATTENTION.search(name) else OTHER
    return OTHER if name.startswith(_COMPILED) else None


@lru_cache(MOST_NAMES)
def device_kind(name: str) -> str:
    """What a kernel or a copy on a GPU is for."""
    if name.startswith("nccl"):
        return COMMUNICATION
    if _ATTENTION.search(name):
        return ATTENTION
    return MATMUL if _DEVICE_MATMUL.search(name) else OTHER


def _span_of(event: Event) -> tuple[float, float] | None:
    """Start and end of an event in microseconds; None if they are not valid."""
    start, took = event.get("ts"), event.get("dur")
    if not (_is_time(start) and _is_time(took)) or took < 0:
        return None
    return float(start), float(start) + float(took)


def _is_time(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -LARGEST_TIME < value < LARGEST_TIME
