"""How gptctl reaches a Slurm cluster: what the backend needs of the place where it runs.

`direct_access.py`: gptctl runs on the cluster. `login_access.py`: it runs elsewhere, and uses a
login host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gptctl.backends.slurm.client import SlurmClient
from gptctl.backends.slurm.queue import Queue
from gptctl.engine.job_result import Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.store import JobRecord


class Access(Protocol):
    """Slurm's commands, and the job's folder on the cluster.

    Every method may raise SlurmError, and may be called again after a doubtful one.
    """

    client: SlurmClient
    queue: Queue

    def connect(self, record: JobRecord) -> None:
        """Raise SlurmError if the cluster cannot be reached: nothing was sent then."""
        ...

    def was_sent(self, record: JobRecord) -> bool:
        """Whether anything of the job may be on the cluster."""
        ...

    def send_folder(self, plan: LaunchPlan, record: JobRecord) -> None:
        """Make the job's folder complete on the cluster."""
        ...

    def sbatch(self, plan: LaunchPlan, record: JobRecord) -> str:
        """Submit the job held, with its token; return Slurm's id."""
        ...

    def claim(self, record: JobRecord, claim: Mapping[str, Any]) -> dict[str, Any]:
        """Record who runs the job unless that was already recorded; return what is recorded."""
        ...

    def forbid_attempts(self, record: JobRecord, now: bool) -> None:
        """Record that the job was cancelled."""
        ...

    def remove_folder(self, record: JobRecord) -> None:
        """Remove the job's folder from the cluster; the caller removes the one on this machine."""
        ...

    def update(self, record: JobRecord) -> None:
        """Bring the job's folder on this machine up to date, if the cluster can be reached."""
        ...

    def final_result(self, record: JobRecord) -> Result | None:
        """Return what a job that has ended recorded, with all its files on this machine."""
        ...

    def command(self, words: Sequence[str], has_terminal: bool) -> list[str]:
        """Return the command of this machine that runs these words on the cluster."""
        ...
