"""The runs of a sweep: plan, check, prepare and submit them.

A sweep keeps its config as it was when it was submitted: runs that are submitted later do not see
edits of the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptctl.cli.overrides import launch_overrides
from gptctl.cli.session import Session
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord
    from gptctl.jobs.submit import Prepared
    from gptctl.jobs.sweep_submit import SubmittedRun
    from gptctl.jobs.sweeps import SweepMember, SweepRecord
    from gptctl.spec.check import Checked
    from gptctl.spec.trust import Source
    from trainer.config import Override
    from trainer.config.tree import Map, ReadFile
    from trainer.errors import Finding

DEPENDENCY = "Launch.slurm.extra.dependency"


def refuse_templates(template: str | None) -> None:
    if template is not None:
        hint = "put a folder named templates beside the config"
        raise UserError("sweep does not take --template", hint, WRONG_USAGE)


def planned_sweep(
    session: Session, file: Path, parallel: int | None, arguments: dict[str, Any]
) -> tuple[SweepRecord, list[Source]]:
    """Read the sweep file and its config. The record has no id yet, only the start of one."""
    from gptctl.cli import ui
    from gptctl.jobs.submit import this_site
    from gptctl.jobs.sweeps import new_sweep
    from gptctl.jobs.written_config import as_json as written_json
    from gptctl.spec.check import config_sources, find_config
    from gptctl.spec.sweep import expand, load_sweep, name_of, overruled, require_valid

    loaded = load_sweep(file)
    described = require_valid(loaded, file)
    if arguments["after"]:
        raise UserError("sweep does not take --after", "wait for that job first", WRONG_USAGE)
    typed = launch_overrides(session, **arguments)
    runs = tuple(expand(described))
    for note in overruled(typed, runs):
        ui.say(f"note: {note}")
    # A path in the sweep file is relative to the file, as in _base_.
    named = str(file.parent / described.config) if described.config else None
    site, config = this_site(), find_config(named)
    files: list[ReadFile] = []
    planned = new_sweep(
        id=described.name or name_of(file),
        file=site.absolute(str(file)),
        folder=site.folder,
        config=site.absolute(str(config)),
        runs=runs,
        arguments={"overrides": [list(override) for override in typed]},
        parallel=parallel or described.parallel,
        metric=described.metric.name,
        goal=described.metric.goal,
        written=written_json(common_tree(config, typed, files), site.folder),
    )
    return planned, [loaded.source, *config_sources(files)]


def common_tree(
    config: Path, typed: Sequence[Override], files: list[ReadFile] | None = None
) -> Map:
    """What the config and the options say, for all runs."""
    from trainer.config import load_tree
    from trainer.errors import errors_in

    found: list[Finding] = []
    tree = load_tree(config, typed, found, files)
    if tree is None or errors_in(found):
        raise UserError(f"{config} is invalid", findings=found)
    return tree


def written_tree(record: SweepRecord) -> Map:
    from gptctl.jobs.written_config import from_json
    from trainer.config import Override

    if record.written:
        return from_json(record.written, f"the record of {record.id}").tree
    # An older gptctl kept only the options.
    typed = [
        Override(key, tuple(value) if isinstance(value, list) else value, source, verbatim)
        for key, value, source, verbatim in record.arguments["overrides"]
    ]
    return common_tree(Path(record.config), typed)


def checked_run(
    record: SweepRecord, tree: Map, index: int, before: Sequence[JobRecord] = ()
) -> Checked:
    """Check the config of one run; in Slurm's queue it waits for the jobs `before`."""
    from gptctl.spec.check import check_tree
    from gptctl.spec.sweep import overrides_of
    from trainer.config.layers import with_overrides

    found: list[Finding] = []
    own = with_overrides(tree, overrides_of(record.runs[index], record.id), found)
    own = with_overrides(own, waiting(own, before), found)
    return check_tree(Path(record.config), own, found, profile_of(own, record.folder))


def profile_of(tree: Map, folder: str) -> Path | None:
    """The file of a profile that is named by a relative path: the sweep may be resumed elsewhere.

    None for any other profile.
    """
    from gptctl.jobs.written_config import node_at
    from trainer.config.tree import Scalar

    node = node_at(tree, "Launch.cluster")
    is_path = isinstance(node, Scalar) and ("/" in node.text or node.text.endswith(".yaml"))
    return Path(os.path.join(folder, node.text)) if is_path and isinstance(node, Scalar) else None


def waiting(tree: Map | None, before: Sequence[JobRecord]) -> list[Override]:
    """The override that makes a Slurm job wait until other jobs have ended, however they do."""
    from gptctl.jobs.written_config import node_at
    from trainer.config import Override
    from trainer.config.tree import Scalar

    ids = [job.handle["scheduler_id"] for job in before if "scheduler_id" in job.handle]
    if not ids:
        return []
    # sbatch takes one --dependency: keep the user's own.
    node = node_at(tree, DEPENDENCY) if tree else None
    own = [node.text] if isinstance(node, Scalar) and not node.is_empty else []
    value = ",".join([*own, *(f"afterany:{job}" for job in ids)])
    return [Override(DEPENDENCY, value, "sweep", verbatim=True)]


def checked_runs(record: SweepRecord) -> list[Checked]:
    tree = written_tree(record)
    return [checked_run(record, tree, index) for index in range(len(record.runs))]


def refusal(record: SweepRecord, checks: Sequence[Checked], wrong: Sequence[int]) -> UserError:
    """All mistakes of all runs; those that every run has, once."""
    from gptctl.text import count
    from trainer.errors import errors_in

    found = distinct([each for index in wrong for each in errors_in(checks[index].findings)])
    shown = "; ".join(f"run {index}: {described(record.runs[index])}" for index in wrong[:5])
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    message = f"{count(len(wrong), 'run')} of {len(checks)} cannot start ({shown}{more})"
    hint = "" if len(wrong) == len(checks) else "fix the values, or add --skip-invalid"
    return UserError(message, hint, findings=found)


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Every finding once. Their values may be lists and mappings, so text is compared."""
    return list({f"{finding} {finding.hint}": finding for finding in findings}.values())


def described(run: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in run.items())


def submit_runs(
    session: Session,
    record: SweepRecord,
    prepared: Mapping[int, Prepared],
    active: Sequence[JobRecord],
) -> list[SubmittedRun]:
    """Submit runs that have no job yet: as one array if the cluster can, else one by one."""
    from gptctl.jobs.sweep_submit import submit_one_by_one, submit_together

    indices, backends = list(prepared), session.backends
    if not active and is_array(session, prepared):
        return submit_together(record, indices, [*prepared.values()], session.store, backends)

    def prepare_run(index: int, before: Sequence[JobRecord]) -> Prepared:
        if not waiting(None, before):
            return prepared[index]
        return prepared_run(session, record, written_tree(record), index, before)

    return submit_one_by_one(record, indices, active, prepare_run, session.store, backends)


def not_submitted(first: SubmittedRun) -> UserError:
    """Why no run was submitted: the first one was refused."""
    error = first.error
    assert error, "a run without a job has an error"
    # Findings say it themselves; they may be those of all runs.
    why = "" if error.findings else f": run {first.number}: {error.message}"
    message = f"the sweep was not submitted{why}"
    return UserError(message, error.hint, error.exit_code, error.findings)


def is_array(session: Session, prepared: Mapping[int, Prepared]) -> bool:
    kinds = {each.plan.kind for each in prepared.values()}
    # An array has a batch script of its own: what the user's templates add would be missing.
    if len(kinds) != 1 or any(each.templates for each in prepared.values()):
        return False
    plans = [each.plan for each in prepared.values()]
    return session.backends.of(kinds.pop()).is_array(plans, [*prepared])


def prepared_runs(
    session: Session, record: SweepRecord, indices: Sequence[int]
) -> dict[int, Prepared]:
    """Prepare all runs before the first one is submitted: any of them may be refused."""
    tree = written_tree(record)
    return {index: prepared_run(session, record, tree, index) for index in indices}


def prepared_run(
    session: Session,
    record: SweepRecord,
    tree: Map,
    index: int,
    before: Sequence[JobRecord] = (),
) -> Prepared:
    from gptctl.cli.submit import templates_of
    from gptctl.jobs.submit import prepare, this_site
    from gptctl.jobs.sweep_submit import sweep_conditions

    checked = checked_run(record, tree, index, before)
    # The sweep may be resumed from another folder.
    site = this_site()._replace(folder=record.folder)
    prepared = prepare(
        checked,
        session.store,
        session.backends,
        site,
        templates=templates_of(None, checked.path),
        conditions=sweep_conditions(record, checked.cluster.traits.has_queue),
    )
    return prepared._replace(sweep=record.id, sweep_index=index, labels=record.labels)


def unfinished(session: Session, known: Sequence[SweepMember]) -> list[JobRecord]:
    """The jobs of a sweep that have not ended, in the order in which they were submitted."""
    from gptctl.jobs.state import is_final

    jobs = [each.job for each in known if each.job]
    active = [job for job in jobs if not is_final(session.state_of(job))]
    # A new job takes the place of an earlier one: the order of the runs is another one.
    places = {job_id: number for number, job_id in enumerate(session.store.ids())}
    return sorted(active, key=lambda job: places.get(job.id, -1))


def continue_runs(
    session: Session,
    record: SweepRecord,
    failed: Sequence[SweepMember],
    active: Sequence[JobRecord],
) -> list[SubmittedRun]:
    from gptctl.jobs.sweep_submit import submit_one_by_one

    jobs = {each.number: each.job for each in failed if each.job}
    steps: dict[int, int | None] = {}

    def prepare_run(index: int, before: Sequence[JobRecord]) -> Prepared:
        steps[index] = newest_step(session, jobs[index])
        return continued_run(session, record, jobs[index], before, steps[index] is not None)

    done = submit_one_by_one(
        record, list(jobs), active, prepare_run, session.store, session.backends
    )
    return [each._replace(step=steps.get(each.number)) for each in done]


def newest_step(session: Session, job: JobRecord) -> int | None:
    """The step of the newest checkpoint of a run, 0 if unknown; None if it has none."""
    from gptctl.jobs.resume import NoCheckpoint, find_resume_point

    try:
        found = find_resume_point(job, session.store, session.backends) if job.output_dir else None
    # Only then: a host that does not answer may have checkpoints.
    except NoCheckpoint:
        return None
    return found.step if found else None


def continued_run(
    session: Session,
    record: SweepRecord,
    job: JobRecord,
    before: Sequence[JobRecord],
    can_resume: bool,
) -> Prepared:
    """The run again: from its newest checkpoint if it has one, else from the start."""
    from gptctl.jobs.labels import LabelStore
    from gptctl.jobs.rerun import Changes, prepare_rerun
    from gptctl.jobs.sweep_submit import sweep_conditions

    changes = Changes(waiting(None, before), resume=can_resume)
    prepared = prepare_rerun(
        job,
        session.store,
        session.backends,
        changes,
        lambda checked: sweep_conditions(record, checked.cluster.traits.has_queue),
    )
    # It may have been tagged since the sweep was submitted.
    labels = record.labels._replace(tags=LabelStore().of(job).tags)
    return prepared._replace(sweep=record.id, sweep_index=job.sweep_index, labels=labels)
