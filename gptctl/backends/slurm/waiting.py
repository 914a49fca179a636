"""Why a job is pending: what Slurm says about it, its partition, and what would start sooner.

At most five commands of Slurm, with the one that told the state: one for the pending jobs, one for
the partitions, and two times `sbatch --test-only`, which submits nothing. The time that it answers
is that after all pending jobs, this one included: it does not know backfill (Slurm 22.05). So it
tells when a job would start in another partition, and for changes in its own only whether Slurm
accepts them; whether they fit in now is counted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
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
from gptctl.text import count

LONGEST_WAIT = 10**8  # seconds; a damaged number may be of any size
MOST_TRIED = 2  # changes that Slurm is asked about
FIELDS = tuple(
    "jobarrayid prioritylong partition numnodes timelimit starttime submittime pendingtime".split()
)
MARGIN = 60.0  # seconds before the start of another job at which a job that fits in must end
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
    limit: int | None = None  # seconds; None: unlimited, or not known
    start: datetime | None = None  # as the backfill scheduler expects
    now: datetime | None = None  # by the clock of the cluster, which may be in another time zone

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
    # Half an answer is better than none.
    try:
        jobs = query_pending(access.client)
        own = next((each for each in jobs if _is_own(each.id, job)), None)
        if own is None:  # it has started since
            return waiting
        waiting = _with_place(waiting, own, jobs)
        known = query_partitions(access.client)
    except SlurmError as error:
        return waiting._replace(not_asked=error.detail)
    waiting = _with_nodes(waiting, own, known)
    if not _WAITS_FOR_NODES.match(waiting.reason):
        return waiting
    tried = list(changes(own, known, _before(own, jobs)))[:MOST_TRIED]
    return waiting._replace(sooner=tuple(_accepted(waiting, tried, record, access.client)))


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


def _with_place(waiting: Waiting, own: PendingJob, jobs: Sequence[PendingJob]) -> Waiting:
    """Add its place among the pending jobs of its partition."""
    rivals = [each for each in jobs if each.partitions & own.partitions]
    return waiting._replace(
        partition=",".join(sorted(own.partitions)),
        nodes_wanted=own.nodes,
        priority=own.priority,
        ahead=len(_before(own, jobs)),
        pending=len(rivals),
    )


def _before(own: PendingJob, jobs: Sequence[PendingJob]) -> list[PendingJob]:
    """The jobs that Slurm considers before this one for the same nodes."""
    # A priority of 0 means that the job is held.
    return [
        each
        for each in jobs
        if each.partitions & own.partitions and each.turn < own.turn and each.priority > 0
    ]


def _with_nodes(waiting: Waiting, own: PendingJob, known: Sequence[Partition]) -> Waiting:
    mine = [each for each in known if each.name in own.partitions]
    best = max(mine, key=lambda each: each.idle, default=None)
    if best is None:
        return waiting
    return waiting._replace(
        nodes_idle=best.idle, nodes_unusable=best.unusable, nodes_total=best.total
    )


def _accepted(
    waiting: Waiting, tried: Sequence[Sooner], record: JobRecord, client: SlurmClient
) -> Iterator[Sooner]:
    """Ask Slurm about each change; yield those that it accepts, and that start sooner."""
    script = read_text(record.run_folder / BATCH_SCRIPT)
    for change in tried if script else ():
        # Slurm refuses what a partition does not allow.
        with suppress(SlurmError):
            options = re.findall(r"(--\w+) (\S+)", change.option)
            said = client.would_start(script, *(f"{name}={value}" for name, value in options))
            start = _START.match(said)
            if change.why and start:
                yield change
            elif start and (not waiting.expected_start or start[1] < waiting.expected_start):
                yield change._replace(start=start[1])


def changes(
    own: PendingJob, known: Sequence[Partition], ahead: Sequence[PendingJob]
) -> Iterator[Sooner]:
    """Changes with which the job may start sooner, the most promising first."""
    mine = [each for each in known if each.name in own.partitions]
    idle = max((each.idle for each in mine), default=0)
    nodes = min(idle, own.nodes)
    fewer = f"--nodes {nodes}" if nodes < own.nodes else ""
    are_idle = f"{count(nodes, 'node')} {'is' if nodes == 1 else 'are'} idle"
    if fewer and nodes and not ahead:
        yield Sooner(fewer, "", f"{are_idle}, and no job comes before it")
    if nodes and ahead:
        yield from _in_gap(own, ahead, fewer, are_idle)
    others = [
        each
        for each in known
        if each.is_up and each.name not in own.partitions and each.idle >= own.nodes
    ]
    if others:
        yield Sooner(f"--partition {max(others, key=lambda each: each.idle).name}", "")


def _in_gap(
    own: PendingJob, ahead: Sequence[PendingJob], fewer: str, are_idle: str
) -> Iterator[Sooner]:
    """What backfill starts before the jobs with a higher priority, on nodes that they wait for."""
    starts = [each.start for each in ahead if each.start]
    if not starts or own.now is None:
        return
    first = min(starts)
    seconds = (first - own.now).total_seconds() - MARGIN
    if seconds < MARGIN:
        return
    shorter = "" if own.limit and own.limit <= seconds else f"--time {int(seconds // 60)}"
    # Without a change, backfill will find it by itself.
    if option := " ".join(filter(None, [fewer, shorter])):
        yield Sooner(option, "", f"{are_idle} until another job's start at {first}")


def query_pending(client: SlurmClient) -> list[PendingJob]:
    """Return the pending jobs of all users, as far as the cluster shows them."""
    form = ",".join(f"{field}:{SEPARATOR}" for field in FIELDS)
    text = client.run("squeue", "--noheader", "--states=PENDING", f"--Format={form}")
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [_pending(row) for row in rows if len(row) >= len(FIELDS)]


def _pending(row: Sequence[str]) -> PendingJob:
    cells = [cell.strip() for cell in row[: len(FIELDS)]]
    job, priority, partitions, nodes, limit, start, submitted, waited = cells
    begun = _moment(submitted)
    return PendingJob(
        job,
        _number(priority),
        frozenset(filter(None, partitions.split(","))),
        # Of an elastic job, `2-4`: the smallest number that lets it start.
        _number(nodes.partition("-")[0]),
        _seconds(limit),
        _moment(start),
        begun + timedelta(seconds=min(_number(waited), LONGEST_WAIT)) if begun else None,
    )


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


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # N/A
        return None


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _seconds(limit: str) -> int | None:
    found = _LIMIT.fullmatch(limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
