"""Which old runs `gptctl rm` may remove: what is chosen by age, state and tags, without what is
still needed. Only reads.

A run is a job with those that it continues. Whoever resumes its last job needs the newest verified
checkpoint of the run, whichever of its jobs has saved it: that folder stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gptctl.backends import Backends, JobState
from gptctl.engine.run_folder import RunFolder, checkpoint_steps
from gptctl.jobs.history import History
from gptctl.jobs.job_status import known_states
from gptctl.jobs.remove import check_removable, owners, unfinished_jobs
from gptctl.jobs.resume import frozen_value
from gptctl.jobs.selection import Filters, in_states, select
from gptctl.jobs.snapshots import SNAPSHOT_PATH
from gptctl.jobs.store import JobRecord, Store
from gptctl.remote.parallel import in_parallel
from trainer.checkpoint_names import MANIFEST, is_damaged, is_verified
from trainer.errors import UserError

MAX_ASKED = 8  # jobs whose hosts are asked for checkpoints at the same time


class Rules(NamedTuple):
    """What a user wants to remove."""

    filters: Filters
    before: float | None = None  # only jobs that ended before this moment
    keep: int = 0  # the newest of the jobs that pass the filters stay
    newest_checkpoints: bool = False  # also remove the newest verified checkpoint of a run


class Staying(NamedTuple):
    """A job that is old enough, and stays all the same."""

    record: JobRecord
    state: JobState
    why: str


class OldRuns(NamedTuple):
    """The jobs that can be removed, oldest first, and those that stay."""

    removable: list[JobRecord]
    staying: list[Staying]
    states: Mapping[str, JobState]  # of both, by job id
    too_new: int = 0  # jobs that pass the filters, but ended later
    nearest: str = ""  # if no job passes the filters


def old_runs(rules: Rules, store: Store, backends: Backends) -> OldRuns:
    """Choose the jobs that the rules mean, and say of each other one why it stays."""
    found = select(store, rules.filters)
    states: dict[str, JobState] = {}
    if found.records and rules.filters.states:
        states = known_states(found.records, backends)
        found = in_states(found.records, states, rules.filters.states)
    # No job ends before it is submitted: of those that are too new nothing else is read.
    old = [each for each in found.records if rules.before is None or each.created < rules.before]
    states |= known_states([each for each in old if each.id not in states], backends)
    old = [each for each in old if rules.before is None or _last_moment(each) < rules.before]
    newest = {each.id for each in found.records[::-1][: rules.keep]}
    reasons = {each.id: f"one of the newest {rules.keep}" for each in old if each.id in newest}
    rest = [each for each in old if each.id not in reasons]
    known = store.records() if rest else []
    refused = refusals(rest, known, backends)
    reasons |= {job: error.message for job, error in refused.items()}
    if not rules.newest_checkpoints:
        rest = [each for each in rest if each.id not in reasons]
        reasons |= newest_checkpoints(rest, known, backends)
    return OldRuns(
        [each for each in old if each.id not in reasons],
        [Staying(each, states[each.id], why) for each in old if (why := reasons.get(each.id))],
        states,
        len(found.records) - len(old),
        found.nearest,
    )


def ended_at(record: JobRecord) -> float | None:
    """When a job ended; None if that is not known."""
    result = RunFolder(record.local_dir).result()
    ended = result.ended if result else History().facts(record).get("ended")
    return ended or None


def _last_moment(record: JobRecord) -> float:
    # A clock that was wrong must not make a job older than its record.
    return max(ended_at(record) or 0.0, record.created)


def refusals(
    records: Sequence[JobRecord], known: Sequence[JobRecord], backends: Backends
) -> dict[str, UserError]:
    """Why jobs cannot be removed, whatever the user says: they may run, or others need them."""
    unfinished = unfinished_jobs(known)
    found = {}
    for record in records:
        try:
            check_removable(record, unfinished, backends)
        except UserError as error:
            found[record.id] = error
    return found


class Checkpoint(NamedTuple):
    """The newest checkpoint that a job has saved."""

    folder: str  # where it is, on this machine or on the hosts of the job
    name: str
    is_verified: bool | None  # None: on other machines, where nobody sees it from here

    def why(self, last: str) -> str:
        """Why its folder stays; `last` is the last job of the run."""
        what = "newest verified" if self.is_verified else "newest"
        doubt = ", which may not be verified" if self.is_verified is None else ""
        return f"has the {what} checkpoint of the run of {last}: {self.name}{doubt}"


def newest_checkpoints(
    records: Sequence[JobRecord], known: Sequence[JobRecord], backends: Backends
) -> dict[str, str]:
    """Find the jobs whose folder has the newest checkpoint of a run; say which one it is."""
    # The jobs of a chain save into the folder of the first one.
    chosen = {record.id for record in records}
    here = {Path(record.local_dir): record.id for record in records}
    there = {Path(record.dir_on_nodes): record.id for record in records}
    runs = [run for run in _runs(known) if any(job.id in chosen for job in run)]
    jobs = list({job.id: job for run in runs for job in run}.values())
    answers = in_parallel(lambda job: _checkpoint(job, backends), jobs, MAX_ASKED)
    saved, reasons = dict[str, Checkpoint](), dict[str, str]()
    for job, answer in zip(jobs, answers):
        if isinstance(answer, UserError):
            # Nobody knows whether it has the newest one.
            reasons[job.id] = f"its checkpoints are unknown: {answer.message}"
        elif isinstance(answer, Exception):
            raise answer
        elif answer:
            saved[job.id] = answer
    for run in runs:
        points = [saved[job.id] for job in run if job.id in saved]
        # A run that was killed verified nothing: it can be resumed from any checkpoint.
        for point in [each for each in points if each.is_verified is not False] or points[:1]:
            having = owners(point.folder, here) | owners(point.folder, there)
            reasons |= dict.fromkeys(having, point.why(run[0].id))
            # Behind one that may not be verified, an older job has the one that is.
            if point.is_verified is not None:
                break
    return {job: why for job, why in reasons.items() if job in chosen}


def _runs(known: Sequence[JobRecord]) -> Iterator[list[JobRecord]]:
    """The jobs of every run, newest first. A job that was continued twice is in two runs."""
    by_id = {record.id: record for record in known}
    continued = {record.continues for record in known}
    seen = set[str]()
    last_jobs = [record for record in known if record.id not in continued]
    # Damaged records may form a circle, which has no last job.
    for last in (*last_jobs, *known):
        if last.id not in seen:
            run = [last]
            while (before := by_id.get(run[-1].continues)) and before not in run:
                run.append(before)
            seen |= {job.id for job in run}
            yield run


def _checkpoint(job: JobRecord, backends: Backends) -> Checkpoint | None:
    """The newest checkpoint in the output folder of a job; one on other machines counts, too."""
    if not job.output_dir or not backends.knows(job.kind):
        return None
    folder = Path(job.output_dir)
    if job.run_folder.is_dir() and backends.of(job.kind).is_elsewhere(job):
        place, names = backends.of(job.kind).checkpoints(job)
        steps = checkpoint_steps(names)
        name = f"step_{max(steps, default=0)} on its hosts"
        return Checkpoint(place, name, is_verified=None) if steps else None
    newest_first = [folder / f"step_{step}" for step in _steps_in(folder)]
    undamaged = [each for each in newest_first if not is_damaged(each)]
    for checkpoint in [each for each in undamaged if is_verified(each)] or undamaged:
        return Checkpoint(job.output_dir, checkpoint.name, is_verified(checkpoint))
    snapshot = frozen_value(job, SNAPSHOT_PATH)
    if isinstance(snapshot, str) and os.path.isfile(snapshot):
        return Checkpoint(os.path.dirname(snapshot), os.path.basename(snapshot), is_verified=True)
    return None


def _steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    try:
        steps = checkpoint_steps(os.listdir(folder))
    except OSError:
        return []
    found = [step for step in steps if (folder / f"step_{step}" / MANIFEST).exists()]
    return sorted(found, reverse=True)
