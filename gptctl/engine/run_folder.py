"""The folder of a job: where each of its files is, and what they tell about the state of the job.

config.json  written.json  cluster.json  plan.json  launch.sh  job.sbatch  agent.sh  engine.pyz
code/  git.json       frozen when the job is submitted
claim.json            who runs it (a supervisor, a Slurm job), or that it was abandoned
slurm-job             the number of the Slurm job that runs it
attempt-<k>/          endpoint.json  node.<n>.pid  node.<n>.exit  ranks.<n>.jsonl  unrecoverable
                      last-step (of the trainer, written in every step)
                      environment.json (of the trainer: packages, node, data)
                      hosts  start-checkpoint (the newest checkpoint at its start)  failed
                      outcome.json (how it ended, its first failure, stopped nodes)
                      node.<n>.stop-requested (the node was asked to stop)
logs/attempt-<k>/     workerlog.<rank>  node.<n>.log  batch.log
output/               checkpoints, metrics.jsonl and status.json of the bundled trainer
waiting               what the job waits for before it starts; missing once it runs
events.jsonl          what happened, in order: see `events.py`
alive.json            when the engine was seen alive, every few seconds
notifications/        who was told what, and by whom: see `deliveries.py`
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
import re
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import private, replacing
from gptctl.engine.cause import Cause
from gptctl.engine.contract import (
    CANCELLED_FILE,
    CLAIM,
    PLAN,
    RESULT,
    UNRECOVERABLE_FILE,
    WAITING,
)
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import (
    DamagedFile,
    is_time,
    notice,
    notice_error,
    read_bytes,
    read_json,
    read_text,
)
from gptctl.engine.job_result import (
    COMPLETED,
    FAILED,
    FINAL,
    LONGEST_REASON,
    STOPPED,
    Result,
    parse_result,
)
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.rank_owners import own_records
from gptctl.engine.typed_fields import check_fields

SHORT = 4096  # bytes of a file that has one line
LARGEST_LIST = 1 << 20  # bytes of a list of hosts; ten thousand have a fifth of it
LONGEST_NAME = 255  # characters of a host's name
ABANDONED = {"abandoned": True}  # the claim of a job that must not start
UNSENT = {**ABANDONED, "unsent": True}  # the same, if nothing was sent to the login host
# A process of `processes.identity`, or a job of Slurm: what is there must have these types.
CLAIM_FIELDS = {"host": str, "boot": str, "pid": int, "started": int | None}
_SCHEDULER_ID = re.compile(r"\d{1,18}(_\d{1,18})?", re.ASCII)
NEVER = float("inf")


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
        if not os.path.exists(self._cancelled_by_file):
            with suppress(OSError):
                _write(self._cancelled_by_file, _user())
        with replacing(self.cancelled_file) as stream:
            stream.write(b"now" if now else b"gently")

    def cancelled_by(self) -> tuple[str, float] | None:
        """Return who cancelled the job, and when, if that was recorded."""
        try:
            when = self._cancelled_by_file.stat().st_mtime
        except OSError:
            return None
        return one_line(read_text(self._cancelled_by_file, SHORT)), when

    @property
    def _cancelled_by_file(self) -> Path:
        # Not in the file `cancelled`: the engine of an older job reads that one.
        return self.path / "cancelled-by"

    def not_ended(self) -> list[str]:
        """Return the hosts on which processes of an ended job may still be running."""
        return [one_line(name) for name in read_text(self._not_ended_file).split()]

    def set_not_ended(self, hosts: Iterable[str]) -> None:
        """Record where the job must still be stopped; no hosts: nothing is left anywhere."""
        if names := "\n".join(hosts):
            with replacing(self._not_ended_file) as stream:
                stream.write(names.encode())
        else:
            self._not_ended_file.unlink(missing_ok=True)

    @property
    def _not_ended_file(self) -> Path:
        return self.path / "not-ended"

    @property
    def in_doubt_file(self) -> Path:
        return self.path / "in-doubt"

    @property
    def not_copied_file(self) -> Path:
        return self.path / "not-copied"

    def is_complete(self, state: str) -> bool:
        """Whether a job in this state has ended, and all its records are here."""
        # Until those of remote hosts are copied, a rank without a last one may still be running.
        return state in FINAL and not os.path.exists(self.not_copied_file)

    def is_cancelled_now(self) -> bool:
        """Whether the job was cancelled without time to save."""
        return read_text(self.cancelled_file, SHORT) == "now"

    def set_waiting(self, reason: str) -> None:
        """Record what the job waits for; an empty reason: it starts now."""
        if not reason:
            (self.path / WAITING).unlink(missing_ok=True)
            return
        with replacing(self.path / WAITING) as stream:
            stream.write(reason.encode())

    def waiting_for(self) -> str:
        # One line: a host must not be able to forge rows of `gptctl list`.
        return one_line(read_text(self.path / WAITING, SHORT), LONGEST_REASON)

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number}"

    def attempts(self) -> int:
        """Return how many attempts have begun: the number of the next one."""
        # Not the number of folders: a user may remove an old one to free space.
        return 1 + max(self._attempts(), default=-1)

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts whose folders are there, in order."""
        return sorted(self._attempts())

    def _attempts(self) -> dict[int, Path]:
        """Return the folders of attempts, by number."""
        # Ignore other names, such as a copy that a user made of an attempt.
        entries = [(entry.name[8:], entry) for entry in entries_like(self.path, "attempt-*")]
        return {int(number): entry for number, entry in entries if _is_number(number)}

    def hosts(self, attempt: int) -> list[str]:
        """Return the hosts of an attempt, in node order."""
        names = read_text(self.attempt(attempt) / "hosts", LARGEST_LIST).split()
        return [name for name in names if name.isprintable() and len(name) <= LONGEST_NAME]

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
        _write(part, json.dumps(claim))
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
        if not claim or claim in (ABANDONED, UNSENT):
            return claim
        try:
            check_fields(claim, CLAIM_FIELDS)
        except DamagedFile as error:
            notice(self.claim_file, str(error))
            return None
        # The id becomes an argument of Slurm's commands: accept nothing but a number.
        is_valid = "host" in claim and is_scheduler_id(claim.get("scheduler_id", "0"))
        return claim if is_valid else None

    def finish(
        self,
        state: str,
        reason: str,
        failure: Cause | None = None,
        not_ended: Iterable[int] | None = None,
    ) -> None:
        """Record the result of the job."""
        left = None if not_ended is None else tuple(not_ended)
        result = Result(state, one_line(reason, LONGEST_REASON), time.time(), failure, left)
        with replacing(self.path / RESULT) as stream:
            stream.write(json.dumps(result.as_json()).encode() + b"\n")

    def result(self) -> Result | None:
        return parse_result(read_json(self.path / RESULT))

    def exit_codes(self, attempt: int, nodes: Container[int]) -> dict[int, int]:
        """Return the exit codes that these nodes have recorded."""
        codes = {}
        # By what is there: a damaged record may claim any number of nodes.
        for file in entries_like(self.attempt(attempt), "node.*.exit"):
            node, text = file.name.split(".")[1], read_text(file, SHORT).strip()
            if _is_number(node) and int(node) in nodes and _is_number(text):
                codes[int(node)] = int(text)
        return dict(sorted(codes.items()))

    def records(self, attempt: int, nodes: Iterable[int]) -> dict[str, bytes]:
        """Read what ranks and launch scripts of these nodes have recorded, by file name."""
        names = [name for node in nodes for name in (f"ranks.{node}.jsonl", f"node.{node}.exit")]
        found = {name: read_bytes(self.attempt(attempt) / name) for name in names}
        return self.own_records(attempt, {name: data for name, data in found.items() if data})

    def own_records(self, attempt: int, found: Mapping[str, bytes]) -> dict[str, bytes]:
        """Drop from records of an attempt what nodes recorded about ranks of other nodes."""
        try:
            plan = read_plan(self.path)
        except DamagedFile:
            plan = None
        records, forged = own_records(found, plan)
        for name in forged:
            notice(self.attempt(attempt) / name, "lines about ranks that its node does not have")
        return records

    def change_times(self, attempt: int, names: Iterable[str]) -> dict[str, float]:
        """When these files of an attempt were written last, by the clock of their file system."""
        found = {}
        for name in names:
            with suppress(OSError):
                found[name] = (self.attempt(attempt) / name).stat().st_mtime
        return found

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
        _write(self.attempt(attempt) / "start-checkpoint", f"{checkpoint}\n")

    def num_stalled(self, attempt: int, checkpoint: int) -> int:
        """Count the attempts, backwards from this one, that began with the newest checkpoint."""
        # There is no attempt -1, so the loop ends at the first attempt.
        number, stalled = attempt, 0
        while self._start_checkpoint(number) == str(checkpoint):
            # The trainer saves when it is asked to stop, except before its first step: such an
            # attempt had no chance to make progress.
            stalled += not os.path.exists(self._stopped_file(number))
            number -= 1
        return stalled

    def _start_checkpoint(self, attempt: int) -> str:
        return read_text(self.attempt(attempt) / "start-checkpoint", SHORT).strip()

    def record_clean_stop(self, attempt: int) -> None:
        self._stopped_file(attempt).touch(0o600)

    def _stopped_file(self, attempt: int) -> Path:
        return self.attempt(attempt) / "stopped"

    def record_failure(self, attempt: int) -> None:
        (self.attempt(attempt) / "failed").touch(0o600)

    def num_failures(self) -> int:
        return sum(1 for folder in self._attempts().values() if os.path.exists(folder / "failed"))

    def torchruns(self, attempt: int) -> dict[int, int]:
        """Return the pid of torchrun for each node where it has started."""
        numbers = {}
        for file in entries_like(self.attempt(attempt), "node.*.pid"):
            # The file is empty while launch.sh writes it.
            node, pid = file.name.split(".")[1], read_text(file, SHORT).strip()
            if _is_number(node) and _is_number(pid):
                numbers[int(node)] = int(pid)
        return numbers

    def has_ranks(self, attempt: int) -> bool:
        """Whether any rank has started."""
        files = entries_like(self.attempt(attempt), "ranks.*.jsonl")
        return any(read_bytes(file, 1) for file in files)

    def mark_unrecoverable(self, attempt: int) -> None:
        """Record here what a rank reported on another machine."""
        (self.attempt(attempt) / UNRECOVERABLE_FILE).touch(0o600)

    def is_unrecoverable(self, attempt: int) -> bool:
        """Whether a rank reported that a restart would fail in the same way."""
        return os.path.exists(self.attempt(attempt) / UNRECOVERABLE_FILE)

    def attempt_result(
        self,
        attempt: int,
        codes: Mapping[int, int],
        nnodes: str,
        output_dir: str,
        since: float = NEVER,
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

    def has_stopped_on_purpose(self, attempt: int, output_dir: str, since: float = NEVER) -> bool:
        """Whether the trainer recorded a clean stop, which torchrun reports as a failure.

        `since`: for the trainer of an older version, which did not say who wrote its status.
        """
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
        match read_json(self.attempt(self.attempts() - 1) / "endpoint.json"):
            case {"host": str(host), "port": int(port)}:
                return f"{one_line(host)}:{port}"
        return ""


def _write(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8", opener=private) as stream:
        stream.write(text)


def read_plan(folder: Path) -> LaunchPlan:
    """Read plan.json; raise DamagedFile if it is missing or damaged."""
    if (values := read_json(folder / PLAN)) is None:
        raise DamagedFile("missing, or not valid JSON")
    return LaunchPlan.from_json(values)


def entries_like(folder: Path, pattern: str) -> list[Path]:
    """Return what is in a folder under such names; nothing if it cannot be read."""
    # Path.glob would raise PermissionError if a folder above it cannot be searched.
    try:
        return [folder / name for name in os.listdir(folder) if fnmatchcase(name, pattern)]
    except OSError as error:
        notice_error(folder, error)
        return []


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
    return [int(step) for step in steps if step.isdecimal() and len(step) < 16]


def is_scheduler_id(value: object) -> bool:
    """Whether this can be an id of Slurm: `17`, or `17_3` for a task of an array."""
    return isinstance(value, str) and bool(_SCHEDULER_ID.fullmatch(value))


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
