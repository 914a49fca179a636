"""Find jobs that have not ended and write to the same folder or snapshot as a new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from gptctl.backends import Backends
from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.launch_plan import StartConditions
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.jobs.history import History
from gptctl.jobs.resume import frozen_value
from gptctl.jobs.state import is_final, state_of
from gptctl.jobs.store import NEWEST, JobRecord, Store
from gptctl.planning.build import Site
from gptctl.spec.check import Checked
from gptctl.spec.outputs import OUTPUTS, output_of, shared_output
from trainer.errors import Finding, UserError


def check_shared_outputs(
    checked: Checked, site: Site, store: Store, backends: Backends, conditions: StartConditions
) -> Iterator[Finding]:
    """Refuse a job that would overwrite what another one is writing, unless it waits for it."""
    values = {name: value for name in OUTPUTS if (value := output_of(name, checked))}
    # Most jobs have an output folder of their own. A chain shares one, and each job waits.
    if not values or conditions.continues:
        return
    awaited = _awaited(conditions, store)
    others = [
        other
        for other in store.records(last=NEWEST)
        if other.id not in awaited and other.cluster == checked.cluster.name and _may_run(other)
    ]
    for name, value in values.items():
        path = site.absolute(value)
        for other in others:
            is_same = frozen_value(other, f"Engine.save_load.{name}") == path
            if is_same and not is_final(state := state_of(other, backends)):
                who = f"this job and {other.id}, which is {state.state},"
                waiting = f"wait for it: --after {other.id}:any"
                yield shared_output(name, value, who, waiting)
                break


def _awaited(conditions: StartConditions, store: Store) -> set[str]:
    """The jobs that end before this one starts: those that it waits for, and theirs in turn."""
    found, new = set[str](), [dependency["job"] for dependency in conditions.after]
    while new:
        job = new.pop()
        if job in found or not store.holds(job):
            continue
        found.add(job)
        # Without its plan nothing more is known: then that is all.
        with suppress(DamagedFile, UserError):
            plan = read_plan(store.find(job).run_folder)
            new += [str(dependency.get("job")) for dependency in plan.after]
    return found


def _may_run(record: JobRecord) -> bool:
    # Most jobs have ended, and their folders say so without a query.
    return not RunFolder(record.local_dir).result() and not History().state(record)
