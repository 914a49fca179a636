"""Where jobs run. A backend starts a job from its frozen folder, says how it stands, and ends it; nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.store import JobRecord
from trainer.errors import OUT_OF_REACH, UserError

KINDS = ("local", "slurm", "ssh")


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

    def following(self, record: JobRecord) -> AbstractContextManager[None]:
        """While the logs of the job are followed: keeps the job's folder on this machine up to date."""
        ...

    def catch_up(self, record: JobRecord) -> list[str]:
        """Brings the logs of a job on other machines here, as far as they can be reached; says where they cannot."""
        ...

    def state(self, record: JobRecord) -> State:
        """Of a job that has left no result."""
        ...

    def cancel(self, record: JobRecord, now: bool) -> None:
        """Ends every process of the job; returns when none is left."""
        ...

    def output(self, record: JobRecord) -> tuple[str, list[str]]:
        """Where the trainer's checkpoints are when the next job runs there, and what is in that folder."""
        ...

    def abandon(self, record: JobRecord) -> bool:
        """Makes sure that a half-submitted job never starts; False when it has started."""
        ...


def output_seen_here(record: JobRecord) -> tuple[str, list[str]]:
    return record.output_dir, os.listdir(record.output_dir) if os.path.isdir(
        record.output_dir
    ) else []


def backend_of(kind: str) -> Backend:
    if kind not in KINDS:
        hint = f"a newer one may have made this job; this one knows {', '.join(KINDS)}"
        raise UserError(f"this gptctl knows no clusters of kind {kind}", hint, OUT_OF_REACH)
    return cast(
        "Backend",
        import_module(
            f"gptctl.backends.{kind}" if kind == "local" else f"gptctl.backends.{kind}.backend"
        ),
    )
