"""The folder of a job: where each of its files is, and what they tell about the state of the job.

config.json  written.json  cluster.json  plan.json  launch.sh  job.sbatch  agent.sh  engine.pyz
code/  git.json       frozen when the job is submitted
claim.json            who runs it (a supervisor, a Slurm job), or that it was abandoned
slurm-job             the number of the Slurm job that runs it
attempt-<k>/          endpoint.json  node.<n>.pid  node.<n>.exit  ranks.<n>.jsonl  unrecoverable
                      hosts  start-checkpoint (the newest checkpoint at its start)  failed
                      outcome.json (how it ended, and its first failure)
                      node.<n>.stop-requested (the node was asked to stop)
logs/attempt-<k>/     workerlog.<rank>  node.<n>.log  batch.log
output/               checkpoints, metrics.jsonl and status.json of the bundled trainer
waiting               what the job waits for before it starts; missing once it runs
cancelled             no new attempt of this job may start
cancelled-by          who cancelled it
in-doubt              ssh: the job was committed, and may have started
not-copied            ssh: hosts that were unreachable when the job ended: their logs are incomplete
not-ended             ssh: hosts where the job could not be stopped, since they were unreachable
result.json           how it ended
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import replacing
from gptctl.engine.cause import Cause, cause_from
from gptctl.engine.contract import (
    CANCELLED_FILE,
    CLAIM,
    PLAN,
    RESULT,
    UNRECOVERABLE_FILE,
    WAITING,
)
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import is_time, read_bytes, read_json, read_text
from gptctl.engine.launch_plan import LaunchPlan

COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"
TIMEOUT, STOPPED = "TIMEOUT", "STOPPED"
LOST, UNKNOWN, PENDING, RUNNING = "LOST", "UNKNOWN", "PENDING", "RUNNING"
# Only a scheduler reports these.
OUT_OF_MEMORY, PREEMPTED, NODE_FAIL = "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL"
LONGEST_REASON = 500  # characters
# States in which gptctl does not wait for the job any longer.
FINAL = (COMPLETED, FAILED, CANCELLED, TIMEOUT, STOPPED, LOST, OUT_OF_MEMORY, PREEMPTED, NODE_FAIL)


class Result(NamedTuple):
    """How a job ended."""

    state: str  # one of FINAL
    reason: str = ""
    ended: float = 0.0  # seconds since the epoch
    failure: Cause | None = None  # the first failure, if it is known

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "failure": self.failure.as_json() if self.failure else None}


class RunFolder:
    """Reads and writes the files in the folder of one job."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def slurm_job_file(self) -> Path:
        """The number of the Slurm job that runs it; a task of an array has another id, too."""
        return self.path / "slurm-job"

    @property
    def claim_file(self) -> Path:
        return self.path / CLAIM

    @property
    def cancelled_file(self) -> Path:
        return self.path / CANCELLED_FILE

    def is_cancelled(self) -> bool:
        return os.path.exists(self.cancelled_file)

    def cancel(self, now: bool) -> None:
        """Forbid new attempts; with `now`, running ranks get no time to save either."""
        if not self._cancelled_by_file.exists():
            with suppress(OSError):
                self._cancelled_by_file.write_text(_user(), encoding="utf-8")
        with replacing(self.cancelled_file) as stream:
            stream.write(b"now" if now else b"gently")

    def cancelled_by(self) -> tuple[str, float] | None:
        """Return who cancelled the job, and when, if that was recorded."""
        try:
            when = self._cancelled_by_file.stat().st_mtime
        except OSError:
            return None
        return one_line(read_text(self._cancelled_by_file)), when

    @property
    def _cancelled_by_file(self) -> Path:
        # Not in the file `cancelled`: the engine of an older job reads that one.
        return self.path / "cancelled-by"

    @property
    def not_ended_file(self) -> Path:
        return self.path / "not-ended"

    @property
    def in_doubt_file(self) -> Path:
        return self.path / "in-doubt"

    @property
    def not_copied_file(self) -> Path:
        return self.path / "not-copied"

    def is_cancelled_now(self) -> bool:
        """Whether the job was cancelled without time to save."""
        return read_text(self.cancelled_file) == "now"

    def set_waiting(self, reason: str) -> None:
        """Record what the job waits for; an empty reason: it starts now."""
        if not reason:
            (self.path / WAITING).unlink(missing_ok=True)
            return
        with replacing(self.path / WAITING) as stream:
            stream.write(reason.encode())

    def waiting_for(self) -> str:
        # One line: a host must not be able to forge rows of `gptctl list`.
        return " ".join(read_text(self.path / WAITING).split())

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number}"

    def attempts(self) -> int:
        """Return how many attempts have begun: the number of the next one."""
        # Not the number of folders: a user may remove an old one to free space.
        return 1 + max(self._attempts(), default=-1)

    def _attempts(self) -> dict[int, Path]:
        """Return the folders of attempts, by number."""
        # Ignore other names, such as a copy that a user made of an attempt.
        entries = [(entry.name[8:], entry) for entry in self.path.glob("attempt-*")]
        return {int(number): entry for number, entry in entries if _is_number(number)}

    def begin_attempt(self) -> int:
        """Create the folder of the next attempt, and return its number."""
        while True:
            number = self.attempts()
            # Somebody may create a folder of that name just now: never share one.
            with suppress(FileExistsError):
                self.attempt(number).mkdir(parents=True)
                return number

    def try_claim(self, claim: Mapping[str, Any]) -> bool:
        """Record who runs the job, once and for all; return False if that was already recorded."""
        # Linking is atomic, also on NFS: of several processes exactly one succeeds, and readers
        # never see a part of the file.
        part = self.path / f".claim.{os.getpid()}"
        part.write_text(json.dumps(claim), encoding="utf-8")
        try:
            os.link(part, self.claim_file)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def claimed_by(self) -> dict[str, Any] | None:
        """Return the claim, or None if there is none or it is damaged."""
        claim = read_json(self.claim_file)
        if not claim or claim.get("abandoned"):
            return claim
        # The id becomes an argument of Slurm's commands: accept nothing but a number.
        is_valid = isinstance(claim.get("host"), str) and is_scheduler_id(
            claim.get("scheduler_id", "0")
        )
        return claim if is_valid else None

    def finish(self, state: str, reason: str, failure: Cause | None = None) -> None:
        """Record the result of the job."""
        result = Result(state, one_line(reason, LONGEST_REASON), time.time(), failure)
        with replacing(self.path / RESULT) as stream:
            stream.write(json.dumps(result.as_json()).encode() + b"\n")

    def result(self) -> Result | None:
        return parse_result(read_json(self.path / RESULT))

    def exit_codes(self, attempt: int, nodes: Iterable[int]) -> dict[int, int]:
        """Return the exit codes that these nodes have recorded."""
        codes = {}
        for node in nodes:
            text = read_text(self._node_file(attempt, node, "exit")).strip()
            if text.isdecimal():
                codes[node] = int(text)
        return codes

    def records(self, attempt: int, nodes: Iterable[int]) -> dict[str, bytes]:
        """Read what ranks and launch scripts of these nodes have recorded, by file name."""
        names = [name for node in nodes for name in (f"ranks.{node}.jsonl", f"node.{node}.exit")]
        found = {name: read_bytes(self.attempt(attempt) / name) for name in names}
        return {name: data for name, data in found.items() if data}

    def exit_time(self, attempt: int, node: int) -> float:
        # launch.sh writes this file as its last action.
        try:
            return self._node_file(attempt, node, "exit").stat().st_mtime
        except OSError:
            return 0.0

    def stop_was_requested(self, attempt: int, node: int) -> bool:
        """Whether the node's launch.sh received a signal that asks it to stop."""
        # Unlike Path.exists, this does not raise if a network file system is away for a moment.
        return os.path.exists(self._node_file(attempt, node, "stop-requested"))

    def forget_node(self, attempt: int, node: int) -> None:
        """Remove what an earlier start of the same attempt recorded."""
        for kind in ("exit", "pid", "stop-requested"):
            self._node_file(attempt, node, kind).unlink(missing_ok=True)

    def _node_file(self, attempt: int, node: int, kind: str) -> Path:
        return self.attempt(attempt) / f"node.{node}.{kind}"

    def record_start(self, attempt: int, checkpoint: int) -> None:
        """Record the newest checkpoint at the start of an attempt."""
        (self.attempt(attempt) / "start-checkpoint").write_text(f"{checkpoint}\n", encoding="utf-8")

    def num_stalled(self, attempt: int, checkpoint: int) -> int:
        """Count the attempts, backwards from this one, that began with the newest checkpoint."""
        # There is no attempt -1, so the loop ends at the first attempt.
        number, stalled = attempt, 0
        while read_text(self.attempt(number) / "start-checkpoint").strip() == str(checkpoint):
            # The trainer saves when it is asked to stop, except before its first step: such an
            # attempt had no chance to make progress.
            stalled += not self._stopped_file(number).exists()
            number -= 1
        return stalled

    def record_clean_stop(self, attempt: int) -> None:
        self._stopped_file(attempt).touch()

    def _stopped_file(self, attempt: int) -> Path:
        return self.attempt(attempt) / "stopped"

    def record_failure(self, attempt: int) -> None:
        (self.attempt(attempt) / "failed").touch()

    def num_failures(self) -> int:
        return sum(1 for folder in self._attempts().values() if (folder / "failed").exists())

    def torchruns(self, attempt: int) -> dict[int, int]:
        """Return the pid of torchrun for each node where it has started."""
        numbers = {}
        for file in self.attempt(attempt).glob("node.*.pid"):
            # The file is empty while launch.sh writes it.
            node, pid = file.name.split(".")[1], read_text(file).strip()
            if node.isdecimal() and pid.isdecimal():
                numbers[int(node)] = int(pid)
        return numbers

    def has_ranks(self, attempt: int) -> bool:
        """Whether any rank has started."""
        return any(read_text(file) for file in self.attempt(attempt).glob("ranks.*.jsonl"))

    def mark_unrecoverable(self, attempt: int) -> None:
        """Record here what a rank reported on another machine."""
        (self.attempt(attempt) / UNRECOVERABLE_FILE).touch()

    def is_unrecoverable(self, attempt: int) -> bool:
        """Whether a rank reported that a restart would fail in the same way."""
        return os.path.exists(self.attempt(attempt) / UNRECOVERABLE_FILE)

    def attempt_result(
        self,
        attempt: int,
        codes: Mapping[int, int],
        nnodes: str,
        output_dir: str,
        since: float,
    ) -> Result:
        """Decide how an attempt ended, after all its nodes exited; name the first that failed."""
        failed = {node: code for node, code in codes.items() if code}
        fewest, _, most = nnodes.partition(":")
        # An elastic job completes if the minimum number of nodes does.
        enough_are_left = (
            bool(most)
            and len(codes) - len(failed) >= int(fewest)
            and not self.is_unrecoverable(attempt)
        )
        if not failed or enough_are_left:
            return Result(COMPLETED)
        # torchrun exits with an error after a clean stop, too: the trainer's own status decides.
        if self.has_stopped_on_purpose(attempt, output_dir, since):
            return Result(STOPPED, "the trainer stopped on request")
        node, code = next(iter(failed.items()))
        return Result(FAILED, f"node {node}: exit code {code}")

    def has_stopped_on_purpose(self, attempt: int, output_dir: str, since: float) -> bool:
        """Whether the trainer recorded a clean stop, which torchrun reports as a failure."""
        status = read_json(Path(output_dir) / "status.json") if output_dir else None
        # A status of an earlier attempt, or of the job that was resumed, does not count.
        if status is None or status.get("state") != "stopped":
            return False
        # By name, not by time: the clock may have been set back meanwhile.
        if "attempt" in status:
            return (status.get("job"), status["attempt"]) == (self.path.name, attempt)
        return is_time(status.get("time")) and status["time"] >= since

    def endpoint(self) -> str:
        """Return the rendezvous address of the latest attempt."""
        found = read_json(self.attempt(self.attempts() - 1) / "endpoint.json")
        return f"{found.get('host')}:{found.get('port')}" if found else ""


def read_plan(folder: Path) -> LaunchPlan:
    """Read plan.json; raise KeyError if it is missing or damaged."""
    return LaunchPlan.from_json(read_json(folder / PLAN) or {})


def parse_result(found: Mapping[str, Any] | None) -> Result | None:
    """Return the content of result.json, or None if it is missing or damaged."""
    # Hosts of an ssh job send this file: use nothing of it that has the wrong type.
    if not found or found.get("state") not in FINAL:
        return None
    reason, ended = found.get("reason"), found.get("ended")
    # One line: a host must not be able to forge rows of `gptctl list`.
    text = one_line(reason, LONGEST_REASON) if isinstance(reason, str) else ""
    when = ended if is_time(ended) else 0.0
    return Result(found["state"], text, when, cause_from(found.get("failure")))


def newest_checkpoint(output_dir: str) -> int:
    """Return the step of the trainer's newest checkpoint, or -1 if there is none."""
    try:
        names = os.listdir(output_dir)
    except OSError:
        return -1
    return max(checkpoint_steps(names), default=-1)


def checkpoint_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the trainer's checkpoints among the names in its output folder."""
    # A checkpoint that is being written or removed has a suffix after its number.
    steps = [name[len("step_") :] for name in names if name.startswith("step_")]
    return [int(step) for step in steps if step.isdecimal()]


def is_scheduler_id(value: object) -> bool:
    """Whether this can be an id of Slurm: `17`, or `17_3` for a task of an array."""
    job, _, task = value.partition("_") if isinstance(value, str) else ("", "", "")
    return job.isdecimal() and (task.isdecimal() or value == job)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10


def _user() -> str:
    """This user and machine, as people know them."""
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run with any user id
        name = f"user {os.getuid()}"
    return f"{name} on {os.uname().nodename}"
