"""Why a job is pending: what Slurm says about it, its partition, and what would start sooner.

At most five commands of Slurm, with the one that told the state: one for the pending jobs, one for
the partitions, and two times `sbatch --test-only`, which submits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from gptctl.backends import JobState
from gptctl.backends.slurm.access import Access
from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.pending_reasons import reason_text
from gptctl.backends.slurm.queue import SEPARATOR, QueuedJob
from gptctl.backends.slurm.states import NEVER_STARTS
from gptctl.engine.contract import BATCH_SCRIPT
from gptctl.engine.file_reading import read_text
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.reporting import Sooner, Waiting

MOST_TRIED = 2  # changes that Slurm is asked about
FIELDS = ("jobarrayid", "prioritylong", "partition", "numnodes", "timelimit", "starttime")
SHORTEST = 60  # seconds of a time limit that is worth a try
NO_START = ("", "N/A", "Unknown")
# Of a job that waits for its turn: for any other reason, fewer nodes would not help.
_WAITS_FOR_NODES = re.compile(
    r"None|Resources|Priority|ReqNodeNotAvail|SchedDefer|Partition(Node|Time)Limit|BadConstraints"
)
_START = re.compile(r"would start at (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_LIMIT = re.compile(r"(?:(\d{1,5})-)?(?:(\d{1,5}):)?(\d{1,5}):(\d\d)", re.ASCII)


class PendingJob(NamedTuple):
    """A job of anybody that waits."""

    id: str
    priority: int
    partitions: frozenset[str]
    nodes: int
    limit: int | None  # seconds; None: unlimited, or not known
    start: str

    @property
    def turn(self) -> tuple[int, int]:
        number = re.match(r"\d{1,18}", self.id)
        return -self.priority, int(number[0]) if number else 0


class Partition(NamedTuple):
    """The nodes of a partition by state."""

    name: str
    is_up: bool
    idle: int
    unusable: int
    total: int


def waiting_in(access: Access, record: JobRecord, state: JobState) -> Waiting:
    """Explain a pending job; the queue has been asked for its state."""
    folder = RunFolder(record.local_dir)
    claimed = (folder.claimed_by() or {}).get("scheduler_id")
    job = str(claimed or record.handle.get("scheduler_id") or "")
    seen = access.queue.jobs.get(job)
    if seen is None:  # being submitted
        return Waiting(state.reason)
    waiting = _in_words(seen)
    if access.queue.failing_since is not None:
        return waiting._replace(not_asked=access.queue.last_error)
    try:
        return _with_sooner(_with_place(waiting, job, access.client), record, access.client)
    # Half an answer is better than none.
    except SlurmError as error:
        return waiting._replace(not_asked=error.detail)


def _in_words(seen: QueuedJob) -> Waiting:
    reason = seen.reason or "None"
    text = reason_text(reason)
    return Waiting(
        reason,
        text.cause if text else "",
        re.sub(r"\bID\b", seen.id, text.fix) if text else "",
        bool(NEVER_STARTS.search(reason)),
        expected_start="" if seen.start in NO_START else seen.start.replace("T", " "),
    )


def _with_place(waiting: Waiting, job: str, client: SlurmClient) -> Waiting:
    """Add its place among the pending jobs, and the nodes of its partition."""
    jobs = query_pending(client)
    own = next((each for each in jobs if _is_own(each.id, job)), None)
    if own is None:  # it has started since
        return waiting
    rivals = [each for each in jobs if each.partitions & own.partitions]
    waiting = waiting._replace(
        partition=",".join(sorted(own.partitions)),
        nodes_wanted=own.nodes,
        priority=own.priority,
        # A priority of 0 means that the job is held.
        ahead=sum(each.turn < own.turn and each.priority > 0 for each in rivals),
        pending=len(rivals),
    )
    known = query_partitions(client)
    mine = [each for each in known if each.name in own.partitions]
    if mine:
        best = max(mine, key=lambda each: each.idle)
        waiting = waiting._replace(
            nodes_idle=best.idle, nodes_unusable=best.unusable, nodes_total=best.total
        )
    if not _WAITS_FOR_NODES.match(waiting.reason):
        return waiting
    tried = list(changes(own, known))[:MOST_TRIED]
    return waiting._replace(sooner=tuple(Sooner(change, "") for change in tried))


def _with_sooner(waiting: Waiting, record: JobRecord, client: SlurmClient) -> Waiting:
    """Ask Slurm about each change, and keep those with which the job would start sooner."""
    script = read_text(record.run_folder / BATCH_SCRIPT)
    found = []
    for change, _ in waiting.sooner if script else ():
        # Slurm refuses what this partition does not allow.
        with suppress(SlurmError):
            start = _START.match(client.would_start(script, change.replace(" ", "=")))
            if start and (not waiting.expected_start or start[1] < waiting.expected_start):
                found.append(Sooner(change, start[1]))
    return waiting._replace(sooner=tuple(found))


def changes(own: PendingJob, known: Sequence[Partition]) -> Iterator[str]:
    """Options with which the job may start sooner, the most promising first."""
    others = [
        each
        for each in known
        if each.is_up and each.name not in own.partitions and each.idle >= own.nodes
    ]
    if others:
        yield f"--partition {max(others, key=lambda each: each.idle).name}"
    idle = max((each.idle for each in known if each.name in own.partitions), default=0)
    if 0 < idle < own.nodes:
        yield f"--nodes {idle}"
    # Backfill starts a short job in the gap before one with a higher priority.
    if own.limit and own.limit // 4 >= SHORTEST:
        yield f"--time {own.limit // 4 // 60}"


def query_pending(client: SlurmClient) -> list[PendingJob]:
    """Return the pending jobs of all users, as far as the cluster shows them."""
    form = ",".join(f"{field}:{SEPARATOR}" for field in FIELDS)
    text = client.run("squeue", "--noheader", "--states=PENDING", f"--Format={form}")
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [_pending(row) for row in rows if len(row) >= len(FIELDS)]


def _pending(row: Sequence[str]) -> PendingJob:
    job, priority, partitions, nodes, limit, start = (cell.strip() for cell in row[: len(FIELDS)])
    names = frozenset(filter(None, partitions.split(",")))
    # Of an elastic job, `2-4`: the smallest number that lets it start.
    least = nodes.partition("-")[0]
    return PendingJob(job, _number(priority), names, _number(least), _seconds(limit), start)


def query_partitions(client: SlurmClient) -> list[Partition]:
    text = client.run("sinfo", "--noheader", "--format=%R|%a|%F")
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        counts = cells[-1].split("/")  # allocated, idle, other, total
        if len(cells) == 3 and len(counts) == 4:
            name, is_up = cells[0], cells[1] == "up"
            _, idle, unusable, total = map(_number, counts)
            # Nodes of different kinds have a line each.
            known = found.get(name, Partition(name, is_up, 0, 0, 0))
            found[name] = known._replace(
                idle=known.idle + idle,
                unusable=known.unusable + unusable,
                total=known.total + total,
            )
    return list(found.values())


def _is_own(listed: str, job: str) -> bool:
    # The pending tasks of an array have one line: `17_[3-9%2]`.
    return listed == job or ("_" in job and listed.startswith(f"{job.partition('_')[0]}_["))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _seconds(limit: str) -> int | None:
    found = _LIMIT.fullmatch(limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
