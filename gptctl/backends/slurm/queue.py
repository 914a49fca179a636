"""The jobs that Slurm knows. Only text formats are read: they are the same in every version.

One `squeue` answers for all jobs of the user, and is asked again after some seconds at the earliest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gptctl.backends.slurm.client import SlurmError, run

EVERY = 5.0  # seconds between two queries
FIELDS = (
    "jobid",
    "state",
    "reason",
    "starttime",
    "nodelist",
    "restartcnt",
    "exit_code",
    "workdir",
    "comment",
)
SEPARATOR = "\x1f"  # in no value: control characters are refused
RECORDED = ("JobIDRaw", "State", "ExitCode", "NodeList", "WorkDir")
HELD = "JobHeld"
# States that pass by themselves; any other one is the end of a job.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
GOING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


class Recorded(NamedTuple):
    """How a job stands or ended, in Slurm's words."""

    state: str
    code: int
    signal: int
    nodes: str
    work_dir: str


class Seen(NamedTuple):
    """A job as the controller knows it."""

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
    def recorded(self) -> Recorded:
        """As the accounting would write it; `exit_code` is that of wait(2)."""
        return Recorded(
            self.state, self.exit_code >> 8, self.exit_code & 0x7F, self.nodes, self.work_dir
        )


def queue() -> dict[str, Seen]:
    """All jobs of this user that the controller remembers, ended ones too."""
    form = ",".join(f"{field}:{SEPARATOR}" for field in FIELDS)
    mine = f"--user={os.getuid()}"
    lines = run("squeue", "--noheader", "--states=all", mine, f"--Format={form}").splitlines()
    seen = [_seen(line.split(SEPARATOR)) for line in lines]
    return {job.id: job for job in seen if job}


def _seen(fields: Sequence[str]) -> Seen | None:
    if len(fields) < len(FIELDS):
        return None
    job, state, reason, start, nodes, restarts, code, folder, comment = (
        field.strip() for field in fields[: len(FIELDS)]
    )
    return Seen(job, state, reason, start, nodes, _number(restarts), _number(code), folder, comment)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def recorded(ids: Sequence[str]) -> dict[str, Recorded] | None:
    """What the accounting knows of jobs, their last run only; None where there is no accounting."""
    try:
        text = run("sacct", "-X", "-P", "-n", "-j", ",".join(ids), "-o", ",".join(RECORDED))
    except SlurmError as error:
        if error.is_missing or "is disabled" in error.said:
            return None
        raise
    found = {}
    for line in text.splitlines():
        job, state, code, nodes, folder = (line.split("|") + [""] * len(RECORDED))[: len(RECORDED)]
        number, _, signal = code.partition(":")
        found[job] = Recorded(state.split(" ")[0], _number(number), _number(signal), nodes, folder)
    return found


class Queue:
    """The last answer of the controller, asked again when it is some seconds old; it may be silent for a while."""

    def __init__(self) -> None:
        self.jobs: Mapping[str, Seen] = {}
        self.silent_since: float | None = None
        self.fault = ""
        self.has_accounting = False
        self._asked = float("-inf")
        self._records: dict[str, Recorded] = {}
        self._looked_up: dict[str, float] = {}  # when

    def look(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._asked < EVERY:
            return
        try:
            self.jobs = queue()
            self.silent_since = None
        except SlurmError as error:
            self.fault = error.said
            self.silent_since = self.silent_since or time.time()
        self._asked = time.monotonic()

    def look_up(self, jobs: Sequence[str]) -> None:
        """Asks the accounting about jobs that the controller has forgotten, all at once; it may know them late."""
        now = time.monotonic()
        unknown = [job for job in jobs if job not in self.jobs and not self._is_settled(job, now)]
        if unknown:
            found = recorded(unknown)
            self.has_accounting = found is not None
            self._records |= found or {}
            self._looked_up |= dict.fromkeys(unknown, now)

    def _is_settled(self, job: str, now: float) -> bool:
        known = self._records.get(job)
        has_ended = known is not None and known.state not in (*WAITING, *GOING)
        return has_ended or now - self._looked_up.get(job, float("-inf")) < EVERY

    def record(self, job: str) -> Recorded | None:
        self.look_up([job])
        return self._records.get(job)


def with_token(token: str, run_dir: str) -> list[Seen]:
    """Jobs that were submitted with a token, or for a folder: a site's plugin may rewrite comments."""
    return [
        job for job in queue().values() if token in job.comment.split() or job.work_dir == run_dir
    ]
