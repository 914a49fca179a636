"""The jobs that Slurm knows, from squeue and sacct.

Only their text formats are used: unlike JSON, they are the same in every version of Slurm.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gptctl.backends.slurm.client import SlurmClient, SlurmError

QUERY_INTERVAL = 5.0  # seconds between two queries
SQUEUE_FIELDS = tuple(
    "jobarrayid state reason starttime nodelist restartcnt exit_code workdir comment".split()
)
SEPARATOR = "\x1f"  # is in no value: gptctl refuses control characters
SACCT_FIELDS = ("JobID", "State", "ExitCode", "NodeList", "WorkDir")
HELD = "JobHeld"
# States that change by themselves; in any other one the job has ended.
PENDING_STATES = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
)
ACTIVE_STATES = (
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
)


class AccountingRecord(NamedTuple):
    """The state of a job, as the accounting records it."""

    state: str
    code: int
    signal: int
    nodes: str
    work_dir: str


class QueuedJob(NamedTuple):
    """A job in the queue, as the controller reports it."""

    id: str
    state: str
    reason: str
    start: str
    nodes: str
    restarts: int
    exit_code: int
    work_dir: str
    comment: str

    @property
    def is_held(self) -> bool:
        return self.state == "PENDING" and self.reason.startswith(HELD)

    @property
    def as_accounting_record(self) -> AccountingRecord:
        """Convert to the form of the accounting."""
        # squeue reports the exit status of wait(2): the exit code and the signal in one number.
        code, signal = self.exit_code >> 8, self.exit_code & 0x7F
        return AccountingRecord(self.state, code, signal, self.nodes, self.work_dir)


def query_squeue(client: SlurmClient) -> dict[str, QueuedJob]:
    """Return all jobs of this user that the controller knows, including ended ones."""
    # One query for all jobs: a busy controller suffers from many.
    form = ",".join(f"{field}:{SEPARATOR}" for field in SQUEUE_FIELDS)
    # --array: every task of an array has its own line.
    options = ("--noheader", "--states=all", "--array", client.my_jobs, f"--Format={form}")
    lines = client.run("squeue", *options).splitlines()
    seen = [_parse_job(line.split(SEPARATOR)) for line in lines]
    return {job.id: job for job in seen if job}


def _parse_job(fields: Sequence[str]) -> QueuedJob | None:
    # Other output, such as a warning of the cluster.
    if len(fields) < len(SQUEUE_FIELDS):
        return None
    job, state, reason, start, nodes, restarts, code, folder, comment = (
        field.strip() for field in fields[: len(SQUEUE_FIELDS)]
    )
    return QueuedJob(
        job, state, reason, start, nodes, _number(restarts), _number(code), folder, comment
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def query_sacct(client: SlurmClient, ids: Sequence[str]) -> dict[str, AccountingRecord] | None:
    """Return what the accounting knows about the last run of jobs; None without accounting."""
    try:
        options = ("-X", "-P", "-n", "-j", ",".join(ids), "-o", ",".join(SACCT_FIELDS))
        text = client.run("sacct", *options)
    except SlurmError as error:
        if error.is_missing or "is disabled" in error.detail:
            return None
        raise
    found = {}
    for line in text.splitlines():
        job, state, code, nodes, folder = (line.split("|") + [""] * len(SACCT_FIELDS))[
            : len(SACCT_FIELDS)
        ]
        number, _, signal = code.partition(":")
        found[job] = AccountingRecord(
            state.split(" ")[0], _number(number), _number(signal), nodes, folder
        )
    return found


class Queue:
    """The last answer of the controller, and when it stopped answering, if it did."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self.jobs: Mapping[str, QueuedJob] = {}
        self.failing_since: float | None = None
        self.is_silent = False  # not even an error came, for as long as gptctl waits
        self.last_error = ""
        self.has_accounting = False
        self._asked = float("-inf")
        self._records: dict[str, AccountingRecord] = {}
        self._queried: dict[str, float] = {}  # when the accounting was asked about a job

    def refresh(self, now: bool = False) -> None:
        """Ask the controller, unless it was asked a few seconds ago."""
        if not now and time.monotonic() - self._asked < QUERY_INTERVAL:
            return
        try:
            self.jobs = query_squeue(self._client)
            self.failing_since, self.is_silent = None, False
        # Keep the old answer: the last known state is better than none.
        except SlurmError as error:
            self.last_error, self.is_silent = error.detail, error.is_silent
            self.failing_since = self.failing_since or time.time()
        self._asked = time.monotonic()

    def expire(self) -> None:
        """Ask again before the next answer is used: what it was asked about has changed."""
        self._asked = float("-inf")

    def query_accounting(self, jobs: Sequence[str]) -> None:
        """Ask the accounting, with one query, about jobs that the controller has forgotten."""
        now = time.monotonic()
        unknown = [job for job in jobs if job not in self.jobs and not self._is_settled(job, now)]
        if unknown:
            found = query_sacct(self._client, unknown)
            self.has_accounting = found is not None
            self._records |= found or {}
            self._queried |= dict.fromkeys(unknown, now)

    def _is_settled(self, job: str, now: float) -> bool:
        # The accounting may lag behind: ask again about a job that it does not know as ended.
        known = self._records.get(job)
        has_ended = known is not None and known.state not in (*PENDING_STATES, *ACTIVE_STATES)
        return has_ended or now - self._queried.get(job, float("-inf")) < QUERY_INTERVAL

    def record(self, job: str) -> AccountingRecord | None:
        self.query_accounting([job])
        return self._records.get(job)


def find_submitted(client: SlurmClient, token: str, run_dir: str) -> list[QueuedJob]:
    """Find the jobs that were submitted with a token, or for a folder."""
    # By folder, too: a plugin of the cluster may rewrite the comment that contains the token.
    return [
        job
        for job in query_squeue(client).values()
        if token in job.comment.split() or job.work_dir == run_dir
    ]
