"""Slurm's clients: what is asked of them, and what they say. Text formats only, which are the same in every version.

One `squeue` answers for all jobs of the user at once, and again at the earliest after some seconds, whatever is asked.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gptctl.engine.processes import clean_environment
from trainer.errors import OUT_OF_REACH, UserError

EVERY = 5.0  # seconds between two queries
PATIENCE = 60.0  # of one client; by then it has given up itself
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
# What a client says when it cannot tell what became of its request. Whole phrases: it also repeats what the user typed.
_OUT_OF_REACH = re.compile(
    r"socket timed out|operation timed out|unable to contact|connection (refused|reset|timed out)|zero bytes were|"
    r"communication (connection )?(failure|shutdown)|transport endpoint|not responding|temporarily unable|broken pipe|"
    r"protocol authentication|munge encode failed|munge decode failed|unexpected message",
    re.IGNORECASE,
)
# States that pass by themselves; any other one is the end of a job.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
GOING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


class SlurmError(UserError):
    """A client failed. `is_doubtful`: what it asked for may have happened; `is_missing`: there is no such client."""

    def __init__(self, said: str, is_doubtful: bool, is_missing: bool = False) -> None:
        hint = "sinfo shows partitions and their limits; gptctl doctor --cluster looks at more"
        if is_missing:
            hint = "ask on a login node of the cluster"
        elif is_doubtful:
            hint = "ask again in a while; scontrol ping"
        super().__init__(f"Slurm: {said}", hint, OUT_OF_REACH)
        self.said, self.is_doubtful, self.is_missing = said, is_doubtful, is_missing


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


def run(*command: str) -> str:
    """What a client prints; raises SlurmError with what it says when it fails."""
    return _done(command).stdout


def _done(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            timeout=PATIENCE,
            env=environment,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise SlurmError(
            f"there is no {command[0]} here", is_doubtful=False, is_missing=True
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} got no answer in {PATIENCE:.0f} s", is_doubtful=True
        ) from None
    if done.returncode:
        said = (
            said_by(done.stderr or done.stdout)
            or f"{command[0]} ended with exit code {done.returncode}"
        )
        raise failure(said, is_killed=done.returncode < 0)
    return done


def failure(said: str, is_killed: bool = False) -> SlurmError:
    """What a client's words mean."""
    is_missing = "configuration source" in said  # it is installed, but belongs to no cluster
    return SlurmError(
        said, not is_missing and (is_killed or bool(_OUT_OF_REACH.search(said))), is_missing
    )


def said_by(text: str) -> str:
    """The words of a client, without its own name before them."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def would_start(script: str) -> str:
    """When and where Slurm would start a batch script; raises SlurmError with its reason when it would not."""
    said = said_by(_done(["sbatch", "--test-only"], script).stderr)
    return re.sub(r"^Job \d+ to start at (\S+)T", r"would start at \1 ", said)


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


QUEUE = Queue()


def with_token(token: str, run_dir: str) -> list[Seen]:
    """Jobs that were submitted with a token, or for a folder: a site's plugin may rewrite comments."""
    return [
        job for job in queue().values() if token in job.comment.split() or job.work_dir == run_dir
    ]
