"""Submit the runs of a sweep, at most some of them at once.

On clusters without a scheduler, the machine's own queue limits the number. Slurm gets one array if
all runs ask for the same nodes; otherwise each job waits for one that was submitted before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gptctl.backends import Backend, Backends
from gptctl.engine.launch_plan import StartConditions
from gptctl.jobs.array_folders import array_name
from gptctl.jobs.labels import LabelStore
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.submit import (
    Prepared,
    add_record,
    cannot_write,
    complete_record,
    freeze_job,
    new_token,
    submit,
    undo,
)
from gptctl.jobs.sweeps import SweepRecord
from gptctl.spec.trust import require_trust
from trainer.errors import UserError, errors_in

# Prepares the run of this number; the new job waits until the jobs of these records have ended.
PrepareRun = Callable[[int, Sequence[JobRecord]], Prepared]


class SubmittedRun(NamedTuple):
    """A run that was submitted, or why it was not."""

    number: int
    record: JobRecord | None
    problem: str = ""  # what failed, also after the start
    error: UserError | None = None  # why it was not submitted
    step: int | None = None  # of the checkpoint that it continues from; 0 if unknown


def sweep_conditions(sweep: SweepRecord, has_queue: bool) -> StartConditions:
    """What a job waits for where no scheduler does it: free machines, and its turn."""
    if has_queue:
        return StartConditions()
    group = sweep.id if sweep.parallel else ""
    return StartConditions(queue=True, group=group, group_limit=sweep.parallel or 0)


def submit_one_by_one(
    sweep: SweepRecord,
    indices: Sequence[int],
    active: Sequence[JobRecord],
    prepare_run: PrepareRun,
    store: Store,
    backends: Backends,
) -> list[SubmittedRun]:
    """Submit runs, each after the one whose place it takes. Stop at the first that is refused."""
    lanes = list(active)
    done: list[SubmittedRun] = []
    for index in indices:
        # With n places, a run takes that of the job n places before it.
        limit = sweep.parallel or 0
        before = [lanes[-limit]] if limit and len(lanes) >= limit else []
        try:
            prepared = prepare_run(index, before)
            sent = submit(prepared, store, backends)
        except UserError as error:
            # The others would most likely be refused, too: `sweep resume` submits them later.
            return [*done, _refused(index, error)]
        lanes.append(sent.record)
        done.append(SubmittedRun(index, sent.record, sent.problem))
        if sent.was_interrupted:
            raise KeyboardInterrupt
    return done


def _refused(index: int, error: UserError) -> SubmittedRun:
    found = "; ".join(f"{each.code} {each.message}" for each in errors_in(error.findings))
    problem = f"{error.message}: {found}" if found else error.message
    return SubmittedRun(index, None, problem, error)


def submit_together(
    sweep: SweepRecord,
    indices: Sequence[int],
    prepared: Sequence[Prepared],
    store: Store,
    backends: Backends,
) -> list[SubmittedRun]:
    """Submit runs that are alike as one array of the scheduler: all of them, or none."""
    require_trust([source for each in prepared for source in each.sources])
    backend = backends.of(prepared[0].plan.kind)
    # One token: if a reply is lost, the array is found by it.
    token = new_token()
    folder = backend.array_folder(prepared[0].plan, array_name(sweep.id, token))
    recorded: list[tuple[Prepared, JobRecord]] = []
    was_sent = False
    try:
        for each in prepared:
            recorded.append(add_record(each, store, backend, token, folder))
        for job, record in recorded:
            LabelStore(store.folder.parent).keep(record, job.labels)
            freeze_job(job, record)
        was_sent = True
        return _started(sweep, indices, recorded, store, backend)
    except BaseException as error:
        records = [record for _, record in recorded]
        if _undone(records, store, backend, was_sent):
            if isinstance(error, OSError):
                error = cannot_write(os.path.dirname(folder), error)
            if isinstance(error, UserError):
                return [_refused(indices[0], error)]
            raise
        # The array runs: what is missing in the records is completed from the run folders.
        records = [complete_record(record, store) for record in records]
        return [SubmittedRun(index, record) for index, record in zip(indices, records)]


def _started(
    sweep: SweepRecord,
    indices: Sequence[int],
    recorded: Sequence[tuple[Prepared, JobRecord]],
    store: Store,
    backend: Backend,
) -> list[SubmittedRun]:
    plans, records = [job.plan for job, _ in recorded], [record for _, record in recorded]
    handles = backend.start_array(plans, records, sweep.parallel)
    done = []
    for index, record, handle in zip(indices, records, handles):
        record = record._replace(handle=handle)
        store.accept(record)
        done.append(SubmittedRun(index, record))
    return done


def _undone(records: Sequence[JobRecord], store: Store, backend: Backend, was_sent: bool) -> bool:
    """Undo the jobs of an array; return whether none of them has started."""
    removed = []
    for record in records:
        # One that cannot be undone now is settled by the next gptctl command.
        with suppress(UserError, OSError):
            # Taking a job back writes into its folder: the disk may be full.
            removed.append(undo(record, store, backend, was_sent))
    return all(removed)
