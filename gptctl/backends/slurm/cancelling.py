"""The steps of cancelling a Slurm job: let it save, and wait until it has left the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from gptctl.backends.slurm.access import Access
from gptctl.backends.slurm.client import SlurmError
from gptctl.backends.slurm.queue import Queue, QueuedJob
from gptctl.backends.slurm.states import STATES
from gptctl.engine.job_result import PENDING, RUNNING
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from trainer.errors import OUT_OF_REACH, UserError

STOP_TIMEOUT = 60.0  # seconds


def ask_to_save(jobs: Mapping[str, QueuedJob], record: JobRecord, access: Access) -> None:
    """Ask the engine to let the ranks save, and wait until it has recorded the result."""
    try_to_run(access, "scancel", "--signal=USR1", "--batch", *jobs)
    queue, deadline = access.queue, time.monotonic() + STOP_TIMEOUT
    while time.monotonic() < deadline and not RunFolder(record.local_dir).result():
        # A job that was killed records no result: check that it still runs.
        queue.refresh()
        if queue.failing_since is None and not any(_is_running(job, queue) for job in jobs):
            return
        if queue.is_silent:
            return
        time.sleep(0.2)
        access.update(record)


def unfinished_jobs(jobs: set[str], access: Access) -> list[QueuedJob]:
    known = [access.queue.jobs[job] for job in jobs if job in access.queue.jobs]
    return [job for job in known if STATES.get(job.state) in (PENDING, RUNNING)]


def _is_running(job: str, queue: Queue) -> bool:
    return job in queue.jobs and STATES.get(queue.jobs[job].state) == RUNNING


def wait_until_ended(jobs: set[str], record: JobRecord, access: Access) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT
    while time.monotonic() < deadline:
        access.queue.refresh(now=True)
        if access.queue.failing_since is None and not unfinished_jobs(jobs, access):
            return
        # It was told to stop, and nobody says whether it has.
        if access.queue.is_silent:
            message = f"{record.id} was told to stop, but may still run: {access.queue.last_error}"
            raise UserError(message, f"check again: gptctl status {record.id}", OUT_OF_REACH)
        time.sleep(1)
    message = f"{record.id} did not stop within {STOP_TIMEOUT:.0f} s"
    raise UserError(message, f"check again: gptctl status {record.id}", OUT_OF_REACH)


def cancel_jobs(access: Access, jobs: Iterable[str]) -> None:
    if ids := list(jobs):
        access.client.run("scancel", *ids)


def try_to_run(access: Access, *command: str) -> None:
    """Run a command whose refusal does not matter, such as a signal to a job that has ended."""
    try:
        access.client.run(*command)
    except SlurmError as error:
        if not error.is_answer:
            raise
