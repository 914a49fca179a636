"""Run the doctor's scripts on nodes with one short Slurm job.

The job is always cancelled at the end. If gptctl is killed, Slurm drops it at its deadline.
"""

from __future__ import annotations

import os.path
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.queue import ACTIVE_STATES, PENDING_STATES, QueuedJob, find_submitted
from gptctl.doctor.probe import BATCH_SCRIPT, MINUTES, ArrivalTracker
from gptctl.doctor.rows import Row, ok, wrong
from gptctl.doctor.signals import signals_blocked
from gptctl.engine.contract import CANNOT_CREATE
from gptctl.engine.file_reading import read_text
from gptctl.reporting import Say
from gptctl.text import count

QUERY_INTERVAL = 2.0  # seconds between two queries to Slurm
SETTLE_TIME = 5.0  # seconds for a late request to reach Slurm, and a late file to get here
SLURM_TIMEOUT = 15.0  # seconds for which Slurm may not answer
CANCEL_TIMEOUT = 60.0
NOT_SHARED = "run_root must be one folder that every node and this machine can see"


class DoctorFolder(NamedTuple):
    """The doctor's folder on this machine, and where its job sees it."""

    here: Path
    there: str
    # If the two differ, these copy the scripts to the cluster, and what nodes wrote to here.
    push: Callable[[], None] = lambda: None
    pull: Callable[[], None] = lambda: None


def run_on_nodes(
    client: SlurmClient,
    folder: DoctorFolder,
    nodes: int,
    timeout: float,
    tracker: ArrivalTracker,
    say: Say,
) -> Row:
    """Run the job, and return a row about it; what the nodes wrote is in the folder."""
    name = f"gptctl-doctor-{secrets.token_hex(4)}"
    job = DoctorJob(name, client, folder, timeout, tracker, say)
    say(f"requesting {count(nodes, 'node')} from Slurm …")
    try:
        # If Ctrl-C killed sbatch, nobody would know whether there is a job.
        with signals_blocked():
            job.submit()
        return job.watch()
    finally:
        with signals_blocked():
            job.remove()


class DoctorJob:
    """A job that is found by its name, since sbatch may fail to report its id."""

    def __init__(
        self,
        name: str,
        client: SlurmClient,
        folder: DoctorFolder,
        timeout: float,
        tracker: ArrivalTracker,
        say: Say,
    ) -> None:
        self.name, self.client, self.timeout = name, client, timeout
        self.folder, self.run_dir, self._pull = folder.here, folder.there, folder.pull
        self.tracker, self.say = tracker, say
        self.submit_error: SlurmError | None = None  # sbatch got no answer: there may be a job
        self._submitted = self._waiting_until = self._answered = time.monotonic()
        self._shown = ""

    def submit(self) -> None:
        # The deadline is long after gptctl gives up. These options override those in the script.
        deadline = int(self.timeout) + 2 * 60 * MINUTES
        options = [
            f"--job-name={self.name}",
            f"--comment={self.name}",
            f"--deadline=now+{deadline}",
            "--no-requeue",
        ]
        self.tracker.not_before = time.time()
        try:
            self.client.run("sbatch", "--parsable", *options, f"{self.run_dir}/{BATCH_SCRIPT}")
        except SlurmError as error:
            if not error.is_doubtful:
                raise
            # Slurm may have accepted the job: look for it instead of submitting another one.
            self.submit_error = error
        self._submitted = self._waiting_until = self._answered = time.monotonic()

    def find(self) -> QueuedJob | None:
        jobs = find_submitted(self.client, self.name, self.run_dir)
        if not jobs:
            return None
        self.submit_error = None
        return max(jobs, key=lambda job: int(job.id))  # the newest, should a name be used twice

    def watch(self) -> Row:
        """Poll the folder all the time, and Slurm now and then, until the job has ended."""
        queried = float("-inf")
        while True:
            self._poll()
            self._show_progress()
            if self._has_finished():
                return self._started_row()
            if time.monotonic() - queried > QUERY_INTERVAL:
                queried = time.monotonic()
                if row := self._query():
                    return row
            time.sleep(0.1)

    def _poll(self) -> None:
        # If that fails, the query of Slurm does, too, and reports it.
        with suppress(SlurmError):
            self._pull()
        self.tracker.poll()

    def _query(self) -> Row | None:
        now = time.time()  # before the query: the job may start while Slurm answers
        try:
            job = self.find()
        except SlurmError as error:
            if not error.is_doubtful or time.monotonic() - self._answered > SLURM_TIMEOUT:
                raise
            self._show(f"Slurm does not answer: {error.detail}")
            return None
        self._answered = time.monotonic()
        if job and job.state in PENDING_STATES:
            self.tracker.not_before, self._waiting_until = now, time.monotonic()
        return self._final_row(job)

    def _show_progress(self) -> None:
        if (self.folder / "measuring").exists():
            self._show("measuring an all-reduce …")
        elif hosts := read_text(self.folder / "hosts").split():
            self._show(f"checking {', '.join(hosts)} …")

    def _show(self, text: str) -> None:
        """Print a message unless it is the one printed last."""
        if text != self._shown:
            self.say(text)
            self._shown = text

    def _final_row(self, job: QueuedJob | None) -> Row | None:
        """None: wait for the job."""
        waited = time.monotonic() - self._submitted
        if job is None:
            if waited < SETTLE_TIME:  # the request may still be on its way
                return None
            lost = SlurmError(f"it no longer knows job {self.name}", is_doubtful=True)
            raise self.submit_error or lost
        if job.state in PENDING_STATES:
            return self._waiting_row(job, waited)
        limit = 60 * MINUTES + CANCEL_TIMEOUT  # Slurm may need a while to enforce its time limit
        if job.state in ACTIVE_STATES and time.monotonic() - self._waiting_until < limit:
            return None
        return self._ended_row(job)

    def _waiting_row(self, job: QueuedJob, waited: float) -> Row | None:
        reason = "" if job.reason in ("", "None") else f": {job.reason}"
        if waited > 1:
            self._show(f"job {job.id} is waiting{reason}")
        if waited <= self.timeout:
            return None
        longer = max(600, 2 * int(self.timeout))
        fix = f"run squeue and sinfo -R to see why, or wait longer: --timeout {longer}"
        return wrong("job", f"job {job.id} waited more than {self.timeout:g} s{reason}", fix)

    def _ended_row(self, job: QueuedJob) -> Row:
        """The job has ended, but its last files may still be on their way."""
        deadline = time.monotonic() + SETTLE_TIME
        while time.monotonic() < deadline:
            self._poll()
            if self._has_finished():
                return self._started_row()
            if reason := read_text(self.folder / "head.failed").strip():
                fix = "set master_interface in the profile, or fix how node names resolve"
                return wrong("job", reason, fix)
            if job.exit_code >> 8 == CANNOT_CREATE:
                found = f"{os.path.dirname(self.run_dir)} does not exist"
                return wrong("run_root", found, NOT_SHARED, job.nodes)
            time.sleep(0.2)
        if job.state == "COMPLETED":
            found = "files that nodes write there do not appear here"
            return wrong("run_root", found, NOT_SHARED, job.nodes)
        found = f"job {job.id} on {job.nodes or 'no node'} ended with state {job.state}"
        return wrong("job", found, "sinfo -R and sacct may show why; then try again")

    def _has_finished(self) -> bool:
        """The batch script creates this file last."""
        return (self.folder / "ended").exists()

    def _started_row(self) -> Row:
        waited = self._waiting_until - self._submitted
        is_short = waited < 2 * QUERY_INTERVAL
        return ok("job", f"started {'at once' if is_short else f'after {waited:.0f} s'}")

    def remove(self) -> None:
        """Cancel the job, and return when it has left the queue."""
        deadline = time.monotonic() + CANCEL_TIMEOUT
        if self.submit_error:  # the request may still reach Slurm
            time.sleep(SETTLE_TIME)
        command = f"scancel --name={self.name}"
        while True:
            problem = f"job {self.name} is still in the queue"
            try:
                if self._cancel():
                    return
            except SlurmError as error:
                problem = error.detail
            if time.monotonic() > deadline:
                self.say(f"warning: {problem}; cancel the job yourself: {command}")
                return
            time.sleep(0.3)

    def _cancel(self) -> bool:
        """True if there is nothing left to cancel."""
        job = self.find()
        if job is None or job.state not in (*PENDING_STATES, *ACTIVE_STATES):
            return True
        if job.state != "COMPLETING" and not self._has_finished():
            self._show(f"cancelling job {job.id} …")
            if job.state in ACTIVE_STATES:  # a plain scancel would wait for the script to exit
                self.client.run("scancel", "--full", "--signal=KILL", job.id)
            self.client.run("scancel", f"--name={self.name}", job.id)
        return False
