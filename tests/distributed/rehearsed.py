"""Rehearsals of the layouts that are trained in tests, and what torch's allocator says about the same code."""

from __future__ import annotations

import gc
import time
from collections import Counter
from typing import Any

from torch.profiler import profile

from tests.distributed.layouts import Case
from tests.ranks import tiny
from trainer import mesh, rehearse
from trainer.collectives import collectives
from trainer.config import Override, load
from trainer.config.resolve import Resolved
from trainer.counting import Call
from trainer.layout import Machines
from trainer.parallel import parallelize
from trainer.precision import Precision
from trainer.rehearse import Rehearsal

LEVELS: dict[str, dict[str, object]] = {
    "fp32": {},
    "O1": {"Engine.mix_precision.enable": True, "Engine.mix_precision.level": "O1"},
    "O2": {"Engine.mix_precision.enable": True, "Engine.mix_precision.level": "O2"},
}


def resolved(case: Case, accumulate: int = 1, **keys: object) -> Resolved:
    """A config of a layout, with a vocabulary, as if the trainer had counted it."""
    arguments = tiny(**{"vocab": 65, **case.keys(accumulate), **keys})
    return load(None, [Override.parse(text) for text in arguments], Machines(1, case.world))


def computed(rehearsal: Rehearsal, known: Resolved, rank: int) -> Counter[Call]:
    """The table of collectives."""
    calls = Counter[Call]()
    for row in collectives(rehearsal.run, known.layout, rank):
        calls[Call(row.operation, row.axis, row.dtype, row.nbytes)] += row.calls
    return calls


class Phases:
    """Notes when the phases begin, in the place of the counter."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []

    def mark(self, *_: Any) -> None:
        pass

    mark_rest = mark

    @property
    def phase(self) -> str:
        return self.begun[-1][1]

    @phase.setter
    def phase(self, name: str) -> None:
        self.begun.append((time.time_ns(), name))


def allocated(known: Resolved, rank: int) -> dict[str, int]:
    """The most bytes in every phase, by torch's own record of real tensors. The other ranks are missing."""
    run = rehearse.rehearsed_config(known.run, known.layout)
    gc.collect()  # or the record would contain the end of earlier tensors
    phases = Phases()
    with mesh.join_alone(known.layout, rank) as alone, profile(profile_memory=True) as profiled:
        precision = Precision(run.Engine.mix_precision, "cpu", known.layout.sharding > 1)
        rehearse._one_update(run, alone, parallelize(run, alone, precision), phases)  # type: ignore[arg-type]
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    peaks, total, phase = dict[str, int](), 0, "build"
    for _, change in sorted([*changes, *phases.begun], key=lambda each: each[0]):
        if isinstance(change, str):
            phase = change
        else:
            total += change
            peaks[phase] = max(peaks.get(phase, 0), total)
    return peaks
