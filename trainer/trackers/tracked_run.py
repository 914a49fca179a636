"""What a tracker is told about a run, and what every tracker can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PROJECT = "gptctl"  # where trackers file a run, unless their own variables say otherwise


class TrackedRun(NamedTuple):
    id: str  # the same in all attempts, and in all jobs that continue one another
    step: int  # the last one that is kept: the first record is of a later step
    folder: Path  # the output folder
    resumed: str  # the checkpoint that was resumed, if it is of another output folder
    config: Mapping[str, Any]

    def flat_config(self) -> Iterator[tuple[str, Any]]:
        return _flat(self.config, "")


class Tracker(Protocol):
    where: str  # for the log: where the curves are

    def log(self, step: int, values: Mapping[str, float], at: float) -> None: ...

    def finish(self, code: int) -> None:
        """End the run: with 0 after the last step or a stop, with 1 after a failure."""


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
