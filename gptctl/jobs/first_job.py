"""The first job of a run, whose id names the run: trackers draw all its jobs as one curve."""

from __future__ import annotations

from gptctl.backends import Backends
from gptctl.engine.contract import PLAN
from gptctl.engine.file_reading import read_json
from gptctl.jobs.resume import ResumePoint, lineage
from gptctl.jobs.state import is_final, state_of
from gptctl.jobs.store import JobRecord, Store
from trainer.errors import UserError


def first_of(record: JobRecord, store: Store) -> str:
    """The first job of the run to which a job belongs."""
    plan = read_json(record.run_folder / PLAN)
    if plan is None:  # its folder was removed
        return lineage(record, store)[-1].id
    known = plan.get("first_job")
    return known if isinstance(known, str) and known else record.id


def first_of_writer(job: str, store: Store) -> str:
    """The same for the job that wrote a snapshot; empty if the store does not know it."""
    if not job or not store.holds(job):
        return ""
    try:
        return first_of(store.find(job), store)
    except UserError:  # its record is damaged, which the store reports
        return job


def first_job(point: ResumePoint, store: Store, backends: Backends) -> str:
    """The first job of the run that a new job continues; empty if it begins a branch of it.

    If another job has already trained from the same job, both cannot be one curve: the new one
    becomes a run of its own. Jobs that left no checkpoint are replaced, and so no reason.
    """
    replaced = {record.id for record in lineage(point.asked, store)}
    others = [
        record
        for record in store.records()
        if record.continues == point.record.id and record.id not in replaced
    ]
    if any(_has_trained(record, backends) for record in others):
        return ""
    return first_of(point.record, store)


def _has_trained(record: JobRecord, backends: Backends) -> bool:
    # Imported here: hardly any job has such others, and this reads logs.
    from gptctl.jobs.training_progress import progress_of

    if not is_final(state_of(record, backends)):
        return True
    return progress_of(record, is_over=True) is not None
