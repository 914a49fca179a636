"""What the supervisor needs of a scheduler. `srun_node.py` has the one for Slurm."""

from __future__ import annotations

from typing import Protocol


class Scheduler(Protocol):
    """The scheduler that owns the job's machines, and may stop the job at any time."""

    can_requeue: bool

    def begin_attempt(self, number: int) -> None:
        """Called before each attempt."""
        ...

    def ending(self) -> str:
        """Return the state that the scheduler is moving the job to; empty while the job runs."""
        ...

    def requeue(self) -> bool:
        """Put the job back into the queue; return False if the scheduler refuses."""
        ...
