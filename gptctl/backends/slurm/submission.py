"""Submit jobs and arrays to Slurm exactly once, or take a submission back.

See `backend.py` for the idea: held, with a token, released after gptctl knows the id.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gptctl.backends.slurm.access import Access
from gptctl.backends.slurm.arrays import array_of, order, write_array
from gptctl.backends.slurm.cancelling import cancel_jobs
from gptctl.backends.slurm.client import SlurmError
from gptctl.backends.slurm.direct_access import sbatch_script
from gptctl.backends.slurm.options import submitted_comment
from gptctl.backends.slurm.queue import QueuedJob, find_submitted
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import ABANDONED, RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.reporting import Say
from trainer.errors import OUT_OF_REACH, UserError

SEND_TIMEOUT = 60.0  # seconds for which an unreachable controller is tried again
REQUEST_DELAY = 3.0  # seconds after which Slurm has processed a request that was still on its way

T = TypeVar("T")


def slurm_dir(record: JobRecord) -> str:
    """The job's folder, as Slurm knows it; for a task, that of its array."""
    return record.array_dir or record.dir_on_nodes


class Submission:
    """Submits to the cluster that `access` reaches."""

    def __init__(self, access: Access, say: Say) -> None:
        self._access, self._say = access, say

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        access, deadline = self._access, time.monotonic() + SEND_TIMEOUT
        access.connect(record)
        self._retried(lambda: access.send_folder(plan, record), deadline)
        # Sending may have taken longer than Slurm may.
        deadline = time.monotonic() + SEND_TIMEOUT
        # 1. Submit it held: Slurm must not start it before gptctl knows its id.
        job, was_doubtful = self._send_once(
            lambda: access.sbatch(plan, record), lambda: self.found(record, deadline), deadline
        )
        handle = {"scheduler_id": job, "host": plan.login or os.uname().nodename}
        # 2. Give it the claim: of several Slurm jobs for this folder only this one does anything.
        if self._retried(lambda: access.claim(record, handle), deadline) != handle:
            message = f"another gptctl process undid the submission of {plan.job_id}"
            raise UserError(message, "submit it again", OUT_OF_REACH)
        # 3. Remove the others, if a request was repeated because its reply was lost.
        if was_doubtful:
            others = [other.id for other in self.found(record, deadline) if other.id != job]
            self._retried(lambda: cancel_jobs(access, others), deadline)
        # 4. Only now let Slurm start it.
        self._release(job, record, deadline)
        return handle

    def start_array(
        self, plans: Sequence[LaunchPlan], records: Sequence[JobRecord], limit: int | None
    ) -> list[dict[str, Any]]:
        """The same steps as `start`, for all tasks of an array at once."""
        access, deadline = self._access, time.monotonic() + SEND_TIMEOUT
        for plan, record in zip(plans, records):
            access.send_folder(plan, record)
        script = write_array(plans, records, limit)
        comment = submitted_comment(plans[0], records[0].token)

        def found() -> list[QueuedJob]:
            return self._submitted(records[0], deadline)

        first, was_doubtful = self._send_once(
            lambda: sbatch_script(script, comment), found, deadline
        )
        array = array_of(first)
        host = os.uname().nodename
        handles = [
            {"scheduler_id": f"{array}_{record.sweep_index}", "host": host} for record in records
        ]
        for record, handle in zip(records, handles):
            if access.claim(record, handle) != handle:
                message = f"another gptctl process undid the submission of {record.id}"
                raise UserError(message, "submit it again", OUT_OF_REACH)
        if was_doubtful:
            others = {array_of(other.id) for other in found()} - {array}
            self._retried(lambda: cancel_jobs(access, others), deadline)
        self._release(array, records[0], deadline)
        return handles

    def _send_once(
        self, send: Callable[[], str], find: Callable[[], list[QueuedJob]], deadline: float
    ) -> tuple[str, bool]:
        """Submit the job; return its id, and whether it may have been submitted more than once."""
        was_doubtful = is_reported = False
        while True:
            try:
                return send(), was_doubtful
            except SlurmError as error:
                # Without sbatch nothing was sent.
                if error.is_missing:
                    raise
                was_doubtful = True
                # Slurm may have accepted the job although sbatch failed: look for its token first.
                if found := find():
                    return found[0].id, True
                if not error.is_doubtful or error.is_silent:
                    raise
                if not is_reported:
                    self._say(f"{error.detail}; trying again …")
                is_reported = True
                # The request may still be on its way: wait, and look again before sending another.
                time.sleep(REQUEST_DELAY)
                if found := find():
                    return found[0].id, True
                if time.monotonic() > deadline:
                    raise

    def found(self, record: JobRecord, deadline: float) -> list[QueuedJob]:
        """Find the Slurm jobs that were submitted for this record, the oldest first."""
        found = self._submitted(record, deadline)
        # The other tasks of the array are other jobs.
        own = f"_{record.sweep_index}"
        return [job for job in found if not record.array_dir or job.id.endswith(own)]

    def _submitted(self, record: JobRecord, deadline: float) -> list[QueuedJob]:
        """Find all Slurm jobs with the token of this record: for an array, all its tasks."""
        client = self._access.client

        def ask() -> list[QueuedJob]:
            found = find_submitted(client, record.token, slurm_dir(record))
            return sorted(found, key=lambda job: order(job.id))

        return self._retried(ask, deadline)

    def _release(self, job: str, record: JobRecord, deadline: float) -> None:
        def release() -> None:
            try:
                self._access.client.run("scontrol", "release", job)
            # The reply may have been lost after Slurm released the job.
            except SlurmError:
                found = self._submitted(record, deadline)
                own = [seen for seen in found if job in (seen.id, array_of(seen.id))]
                if not own or any(seen.is_held for seen in own):
                    raise

        self._retried(release, deadline)

    def _retried(self, action: Callable[[], T], deadline: float) -> T:
        """Repeat a request until Slurm answers or the deadline has passed."""
        is_reported = False
        while True:
            try:
                return action()
            except SlurmError as error:
                # Who was silent for so long is not asked again: the user waits.
                if not error.is_doubtful or error.is_silent or time.monotonic() > deadline:
                    raise
                if not is_reported:
                    self._say(f"{error.detail}; trying again …")
                is_reported = True
                time.sleep(1)

    def abandon(self, record: JobRecord) -> bool:
        """Remove a job that was submitted but not released from the queue."""
        access, folder = self._access, RunFolder(record.local_dir)
        if not access.was_sent(record):
            return True
        # Without the claim the job does nothing, even if it cannot be removed now.
        owner = access.claim(record, ABANDONED).get("scheduler_id")
        try:
            jobs = self.found(record, time.monotonic())
        except SlurmError as error:
            # Nothing can have been submitted from a machine without Slurm.
            if error.is_missing and not owner:
                return True
            raise
        has_begun = any(job.id == owner and not job.is_held for job in jobs)
        if owner and owner not in {job.id for job in jobs}:
            # Slurm has forgotten it after it ran, or lost it before it was released.
            has_begun = access.final_result(record) is not None or folder.attempts() > 0
        cancel_jobs(access, (job.id for job in jobs if job.id != owner or not has_begun))
        if not has_begun:
            access.remove_folder(record)
        return not has_begun
