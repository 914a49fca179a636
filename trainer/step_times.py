"""Where the time of a step goes on this rank: waiting for other ranks, the optimizer, and the rest.

On a CPU, these are spans of the host's clock. On a GPU the host only starts computations, so they
are pairs of events on the device's stream, recorded in logged steps only. They are read when the
next step is logged: by then they have long been complete, and nothing waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trainer.shared_memory import PeerSockets

STEP, WAIT, OPTIMIZER = "step", "wait", "optimizer"


class Shares(NamedTuple):
    """Parts of a step's time, from when its data is there."""

    wait: float = 0.0
    optimizer: float = 0.0


class HostSpans:
    """Adds up the spans of all steps."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((STEP, WAIT, OPTIMIZER), 0.0)

    def begin_step(self, is_sampled: bool) -> None:
        """Steps cost nothing to measure here: all of them are."""

    def begin(self) -> Any:
        return time.perf_counter()

    def end(self, kind: str, began: Any) -> None:
        self._seconds[kind] += time.perf_counter() - began

    def shares(self) -> Shares:
        """The shares of all steps since the last reset."""
        return _shares(self._seconds)

    def reset(self) -> None:
        self._seconds = dict.fromkeys(self._seconds, 0.0)


class DeviceSpans:
    """Measures the steps that are logged, with events on the current stream.

    The wait for a message makes the stream wait, not the host: the events around it show how long.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event, self._is_sampled = new_event, False
        self._spans: list[tuple[str, Any, Any]] = []
        self._shares = Shares()

    def begin_step(self, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        if is_sampled:
            self._spans = []

    def begin(self) -> Any:
        return self._recorded() if self._is_sampled else None

    def end(self, kind: str, began: Any) -> None:
        if began is not None:
            self._spans.append((kind, began, self._recorded()))

    def shares(self) -> Shares:
        """The shares of the last step that was measured and is complete."""
        if self._spans and all(end.query() for _, _, end in self._spans):
            seconds = dict.fromkeys((STEP, WAIT, OPTIMIZER), 0.0)
            for kind, begin, end in self._spans:
                seconds[kind] += begin.elapsed_time(end)
            self._spans, self._shares = [], _shares(seconds)
        return self._shares

    def reset(self) -> None:
        """What one step showed holds until the next one is measured."""

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event


Spans = HostSpans | DeviceSpans


def _shares(seconds: dict[str, float]) -> Shares:
    whole = seconds[STEP]
    if whole <= 0:
        return Shares()
    return Shares(min(1.0, seconds[WAIT] / whole), min(1.0, seconds[OPTIMIZER] / whole))


def spans_on(device: torch.device) -> Spans:
    if device.type == "cuda":
        return DeviceSpans(lambda: torch.cuda.Event(enable_timing=True))
    return HostSpans()


@contextmanager
def measured(spans: Spans, kind: str) -> Iterator[None]:
    began = spans.begin()
    try:
        yield
    finally:
        spans.end(kind, began)


@contextmanager
def timed_waits(spans: Spans) -> Iterator[None]:
    """Measure how long this thread waits for messages, whoever sends them: also FSDP, pipelines.

    Every wait of torch ends here: the watchdog recognises a waiting rank by this file, too.
    """
    from torch.distributed import Work as TorchWork

    thread = threading.get_ident()

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed_wait(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:  # a checkpoint is written beside the training
                return wait(*arguments, **options)
            began = spans.begin()
            try:
                return wait(*arguments, **options)
            finally:
                spans.end(WAIT, began)

        return timed_wait

    waits = {kind: kind.wait for kind in (TorchWork, PeerSockets)}
    for kind, wait in waits.items():
        kind.wait = timed(wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, wait in waits.items():
            kind.wait = wait  # type: ignore[method-assign]
