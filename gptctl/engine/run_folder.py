"""The folder of a job: where each of its files is, and what those files say of how the job stands.

config.json  cluster.json  plan.json  launch.sh  job.sbatch  code/  git.json     frozen when the job is submitted
claim.json            who runs it (a supervisor, a job of Slurm), or that nobody ever will
attempt-<k>/          endpoint.json  node.<n>.pid  node.<n>.exit  ranks.<n>.jsonl  cannot-be-helped
                      Slurm: hosts  began-with (its newest checkpoint)  failed  node.<n>.asked (to stop)
logs/attempt-<k>/     workerlog.<rank>  node.<n>.log  batch.log
output/               checkpoints, metrics.jsonl and status.json of the bundled trainer
cancelled             nothing of this job may start any more
in-doubt              ssh: from now on the job may have started
not-copied            ssh: hosts that were out of reach when the job ended, whose logs here are not complete
not-ended             ssh: hosts where it could not be ended, since they were out of reach
result.json           how it ended
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import replacing
from gptctl.engine.launch_plan import LaunchPlan

COMPLETED, FAILED, CANCELLED, TIMEOUT, STOPPED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "STOPPED",
)
LOST, UNKNOWN, PENDING, RUNNING = "LOST", "UNKNOWN", "PENDING", "RUNNING"
OUT_OF_MEMORY, PREEMPTED, NODE_FAIL = (
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "NODE_FAIL",
)  # only schedulers know of these
FINAL = (COMPLETED, FAILED, CANCELLED, TIMEOUT, STOPPED, LOST, OUT_OF_MEMORY, PREEMPTED, NODE_FAIL)


class Result(NamedTuple):
    """How a job ended."""

    state: str
    reason: str = ""
    ended: float = 0.0


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def claim(self) -> Path:
        return self.path / "claim.json"

    @property
    def cancelled(self) -> Path:
        return self.path / "cancelled"

    def cancel(self, now: bool) -> None:
        """From now on nothing of this job starts; `now`: what runs gets no time to save."""
        with replacing(self.cancelled) as stream:
            stream.write(b"now" if now else b"gently")

    @property
    def not_ended(self) -> Path:
        return self.path / "not-ended"

    @property
    def in_doubt(self) -> Path:
        return self.path / "in-doubt"

    @property
    def not_copied(self) -> Path:
        return self.path / "not-copied"

    def is_hurried(self) -> bool:
        return read_text(self.cancelled) == "now"

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number}"

    def attempts(self) -> int:
        """How many attempts have begun."""
        return sum(1 for entry in self.path.glob("attempt-*") if entry.name[8:].isdecimal())

    def take(self, claim: Mapping[str, Any]) -> bool:
        """Decides once and for all who runs the job; False when that has been decided already."""
        part = self.path / f".claim.{os.getpid()}"
        part.write_text(json.dumps(claim), encoding="utf-8")
        try:
            os.link(part, self.claim)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def claimed_by(self) -> dict[str, Any] | None:
        claim = read_json(self.claim)
        if not claim or claim.get("abandoned"):
            return claim
        is_sound = isinstance(claim.get("host"), str) and is_scheduler_id(
            claim.get("scheduler_id", "0")
        )
        return claim if is_sound else None

    def finish(self, state: str, reason: str) -> None:
        with replacing(self.path / "result.json") as stream:
            stream.write(json.dumps(Result(state, reason, time.time())._asdict()).encode() + b"\n")

    def forget_result(self) -> None:
        (self.path / "result.json").unlink(missing_ok=True)

    def result(self) -> Result | None:
        found = read_json(self.path / "result.json")
        if not found or found.get("state") not in FINAL:
            return None
        kinds: dict[str, Any] = {"state": str, "reason": str, "ended": (int, float)}
        return Result(
            **{
                name: found[name]
                for name, kind in kinds.items()
                if isinstance(found.get(name), kind)
            }
        )

    def exit_codes(self, attempt: int, nodes: Iterable[int]) -> dict[int, int]:
        """The exit codes that these nodes have recorded."""
        codes = {}
        for node in nodes:
            text = read_text(self._node_file(attempt, node, "exit")).strip()
            if text.isdecimal():
                codes[node] = int(text)
        return codes

    def exit_time(self, attempt: int, node: int) -> float:
        try:
            return self._node_file(attempt, node, "exit").stat().st_mtime
        except OSError:
            return 0.0

    def was_asked(self, attempt: int, node: int) -> bool:
        """Whether somebody asked the node to stop, by a signal to its launch.sh."""
        return self._node_file(attempt, node, "asked").exists()

    def forget_node(self, attempt: int, node: int) -> None:
        """Remove what an earlier start of the same attempt has recorded."""
        for kind in ("exit", "pid", "asked"):
            self._node_file(attempt, node, kind).unlink(missing_ok=True)

    def _node_file(self, attempt: int, node: int, kind: str) -> Path:
        return self.attempt(attempt) / f"node.{node}.{kind}"

    def note_start(self, attempt: int, checkpoint: int) -> None:
        """Remember the newest checkpoint at the start of an attempt."""
        (self.attempt(attempt) / "began-with").write_text(f"{checkpoint}\n", encoding="utf-8")

    def stalled(self, attempt: int, checkpoint: int) -> int:
        """How many attempts, counted back from this one, began with the newest checkpoint."""
        number = attempt
        while read_text(self.attempt(number) / "began-with").strip() == str(checkpoint):
            number -= 1
        return attempt - number

    def note_failure(self, attempt: int) -> None:
        (self.attempt(attempt) / "failed").touch()

    def failures(self) -> int:
        return sum(1 for _ in self.path.glob("attempt-*/failed"))

    def torchruns(self, attempt: int) -> dict[int, int]:
        """The process number of each node's torchrun, where it has started."""
        numbers = {}
        for file in self.attempt(attempt).glob("node.*.pid"):
            node, pid = file.name.split(".")[1], read_text(file).strip()
            if node.isdecimal() and pid.isdecimal():
                numbers[int(node)] = int(pid)
        return numbers

    def rank_events(self, attempt: int) -> list[dict[str, Any]]:
        """What the ranks' watchers wrote, per node in the order they wrote it; torn lines are left out."""
        files = sorted(self.attempt(attempt).glob("ranks.*.jsonl"))
        return [event for file in files for event in json_lines(read_text(file).encode())]

    def give_up(self, attempt: int) -> None:
        """What a rank of another machine has said counts here, too."""
        (self.attempt(attempt) / "cannot-be-helped").touch()

    def cannot_be_helped(self, attempt: int) -> bool:
        """Whether a rank has said that starting again would end the same way."""
        return (self.attempt(attempt) / "cannot-be-helped").exists()

    def judge(
        self,
        attempt: int,
        codes: Mapping[int, int],
        nnodes: str,
        output_dir: str,
        since: float,
    ) -> Result:
        """How an attempt ended whose nodes have all exited; the first failing node is named."""
        failed = {node: code for node, code in codes.items() if code}
        fewest, _, most = nnodes.partition(":")
        enough_are_left = (
            bool(most)
            and len(codes) - len(failed) >= int(fewest)
            and not self.cannot_be_helped(attempt)
        )
        if not failed or enough_are_left:
            return Result(COMPLETED)
        if has_stopped_on_purpose(output_dir, since):
            return Result(STOPPED, "the trainer was asked to stop, and saved its work")
        node, code = next(iter(failed.items()))
        return Result(FAILED, f"node {node} exited with code {code}")

    def endpoint(self) -> str:
        """Where the ranks of the latest attempt meet."""
        found = read_json(self.attempt(self.attempts() - 1) / "endpoint.json")
        return f"{found.get('host')}:{found.get('port')}" if found else ""


def read_plan(folder: Path) -> LaunchPlan:
    """KeyError: the plan is missing or damaged."""
    return LaunchPlan.from_json(read_json(folder / "plan.json") or {})


def newest_checkpoint(output_dir: str) -> int:
    """The step of the trainer's newest checkpoint; -1 when there is none."""
    try:
        names = os.listdir(output_dir)
    except OSError:
        return -1
    steps = [name[len("step_") :] for name in names if name.startswith("step_")]
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def is_scheduler_id(value: object) -> bool:
    return isinstance(value, str) and value.isdecimal()


def has_stopped_on_purpose(output_dir: str, since: float) -> bool:
    """Whether the trainer says that it stopped cleanly: torchrun's exit code cannot tell that from a failure."""
    status = read_json(Path(output_dir) / "status.json") if output_dir else None
    return (
        status is not None and status.get("state") == "stopped" and status.get("time", 0.0) >= since
    )


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(read_text(file))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def json_lines(data: bytes) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; torn lines and garbage are passed over."""
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
