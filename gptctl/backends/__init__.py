"""Where jobs run. A backend starts a job from its frozen folder, says how it stands, and ends it; nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from gptctl.jobs import JobRecord
from gptctl.plan import LaunchPlan
from trainer.errors import OUT_OF_REACH, UserError

BUILT = ("local", "slurm")


class State(NamedTuple):
    """How a job stands, as far as it is known."""

    state: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class Backend(Protocol):
    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        """Starts the job whose folder is complete; returns its handle."""
        ...

    def expect(self, records: Sequence[JobRecord]) -> None:
        """The states of these jobs, without results, are asked for next: a scheduler is asked once for all."""
        ...

    def state(self, record: JobRecord) -> State:
        """Of a job that has left no result."""
        ...

    def cancel(self, record: JobRecord, now: bool) -> None:
        """Ends every process of the job; returns when none is left."""
        ...

    def abandon(self, record: JobRecord) -> bool:
        """Makes sure that a half-submitted job never starts; False when it has started."""
        ...


def backend_of(kind: str) -> Backend:
    if kind not in BUILT:
        hint = "`gptctl render` prints the script for it"
        raise UserError(f"submitting to a cluster of kind {kind} is not built yet", hint, OUT_OF_REACH)
    return cast("Backend", import_module(f"gptctl.backends.{kind}"))
