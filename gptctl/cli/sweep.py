"""The verbs for sweeps: many runs of one config, compared by a metric.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import (
    LaunchCommand,
    as_json_option,
    examples,
    launch_options,
    layout_options,
)
from gptctl.cli.session import Session
from gptctl.cli.typed import launch_overrides
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord
    from gptctl.jobs.submit import Prepared
    from gptctl.jobs.sweep_submit import SubmittedRun
    from gptctl.jobs.sweeps import SweepRecord
    from gptctl.spec.check import Checked
    from trainer.errors import Finding

sweep_argument = click.argument("name", metavar="[SWEEP]", required=False)


class SweepCommand(LaunchCommand):
    refused = ("after", "template")


@click.group(
    epilog=examples("gptctl sweep submit sweep.yaml --parallel 3", "gptctl sweep show --plot")
)
def sweep() -> None:
    """Run one config with many values, and compare the results."""


@sweep.command(
    cls=SweepCommand,
    epilog=examples(
        "gptctl sweep submit sweep.yaml --parallel 3",
        "gptctl sweep submit sweep.yaml --cluster a800 --nodes 2 --dry-run",
    ),
)
@click.argument("file", type=click.Path())
@layout_options
@launch_options
@click.option("--parallel", type=click.IntRange(1), metavar="N", help="Run at most N jobs at once.")
@click.option("--skip-invalid", is_flag=True, help="Leave out runs whose config is invalid.")
@click.option("--dry-run", is_flag=True, help="Print the runs; start nothing.")
@as_json_option
@click.pass_obj
def submit(
    session: Session,
    /,
    file: str,
    parallel: int | None,
    skip_invalid: bool,
    dry_run: bool,
    as_json: bool,
    template: str | None,
    **arguments: Any,
) -> int:
    """Submit all runs of a sweep file.

    The file lists config keys with their values: a grid, a list of runs, or ranges from which
    values are drawn. All runs are checked before the first one is submitted.
    """
    from gptctl.cli import ui
    from gptctl.jobs.sweeps import SweepStore
    from gptctl.spec.sweep import varied

    refuse_templates(template)
    planned = planned_sweep(session, Path(file), parallel, arguments)
    checks = checked_runs(planned)
    wrong = [index for index, checked in enumerate(checks) if not checked.is_valid]
    if wrong and not (skip_invalid and len(wrong) < len(checks)):
        raise refusal(planned, checks, wrong)
    for index in wrong:
        ui.say(f"run {index} is left out: {described(planned.runs[index])}: invalid config")
    # Invalid runs are not part of the sweep, so that it can be complete.
    kept = tuple(run for index, run in enumerate(planned.runs) if index not in wrong)
    planned = planned._replace(runs=kept)
    if dry_run:
        rows = [{"run": index, **run} for index, run in enumerate(kept)]
        if as_json:
            ui.print_json(rows)
        else:
            keys = varied(kept)
            ui.print_table(
                f"{len(rows)} runs", ["run", *keys], [[r["run"], *map(r.get, keys)] for r in rows]
            )
        return 0
    record = SweepStore().add(planned)
    done = submit_runs(session, record, list(range(len(kept))))
    return announce(record, done, as_json)


def refuse_templates(template: str | None) -> None:
    if template is not None:
        hint = "put a folder named templates beside the config"
        raise UserError("sweep does not take --template", hint, WRONG_USAGE)


def planned_sweep(
    session: Session, file: Path, parallel: int | None, arguments: dict[str, Any]
) -> SweepRecord:
    """Read the sweep file; the record has no id yet, only the start of one."""
    from gptctl.jobs.submit import this_site
    from gptctl.jobs.sweeps import new_sweep
    from gptctl.spec.check import find_config
    from gptctl.spec.sweep import expand, load_sweep, require_valid

    described = require_valid(load_sweep(file), file)
    if arguments["after"]:
        raise UserError("sweep does not take --after", "wait for that job first", WRONG_USAGE)
    typed = launch_overrides(session, **arguments)
    # A path in the sweep file is relative to the file, as in _base_.
    named = str(file.parent / described.config) if described.config else None
    site = this_site()
    return new_sweep(
        id=described.name or file.stem.replace(" ", "-"),
        file=site.absolute(str(file)),
        folder=site.folder,
        config=site.absolute(str(find_config(named))),
        runs=tuple(expand(described)),
        arguments={"overrides": [list(override) for override in typed]},
        parallel=parallel or described.parallel,
        metric=described.metric.name,
        goal=described.metric.goal,
    )


def checked_run(record: SweepRecord, index: int, before: Sequence[JobRecord] = ()) -> Checked:
    """Check the config of one run; in Slurm's queue it waits for the jobs `before`."""
    from gptctl.spec.check import check_config
    from gptctl.spec.sweep import overrides_of
    from trainer.config import Override

    typed = [
        Override(key, tuple(value) if isinstance(value, list) else value, source, verbatim)
        for key, value, source, verbatim in record.arguments["overrides"]
    ]
    run = overrides_of(record.runs[index], record.id)
    return check_config(Path(record.config), [*typed, *run, *waiting(typed, before)])


def waiting(typed: Sequence[Any], before: Sequence[JobRecord]) -> list[Any]:
    """The override that makes a Slurm job wait until other jobs have ended, however they do."""
    from trainer.config import Override

    key = "Launch.slurm.extra.dependency"
    ids = [job.handle["scheduler_id"] for job in before if "scheduler_id" in job.handle]
    if not ids:
        return []
    # sbatch takes one --dependency: keep the user's own.
    own = [override.value for override in typed if override.key == key]
    value = ",".join([*own, *(f"afterany:{job}" for job in ids)])
    return [Override(key, value, "sweep", verbatim=True)]


def checked_runs(record: SweepRecord) -> list[Checked]:
    return [checked_run(record, index) for index in range(len(record.runs))]


def refusal(record: SweepRecord, checks: Sequence[Checked], wrong: Sequence[int]) -> UserError:
    """All mistakes of all runs; those that every run has, once."""
    from gptctl.text import count
    from trainer.errors import errors_in

    # Findings can hold any value of a config, so they are compared, not hashed.
    found: list[Finding] = []
    for index in wrong:
        found += [each for each in errors_in(checks[index].findings) if each not in found]
    shown = "; ".join(f"run {index}: {described(record.runs[index])}" for index in wrong[:5])
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    message = f"{count(len(wrong), 'run')} of {len(checks)} cannot start ({shown}{more})"
    hint = "" if len(wrong) == len(checks) else "fix the values, or add --skip-invalid"
    return UserError(message, hint, findings=found)


def described(run: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in run.items())


def submit_runs(
    session: Session, record: SweepRecord, indices: Sequence[int]
) -> list[SubmittedRun]:
    """Submit runs that have no job yet: as one array if the cluster can, else one by one."""
    from gptctl.jobs.sweep_submit import submit_one_by_one, submit_together
    from gptctl.jobs.sweeps import members

    active = unfinished(session, [each.job for each in members(record, session.store) if each.job])
    backends = session.backends
    if not active and len(indices) > 1:
        prepared = [prepared_run(session, record, index) for index in indices]
        kinds = {each.plan.kind for each in prepared}
        if len(kinds) == 1 and backends.of(kinds.pop()).is_array([each.plan for each in prepared]):
            return submit_together(record, indices, prepared, session.store, backends)

    def prepare_run(index: int, before: Sequence[JobRecord]) -> Prepared:
        return prepared_run(session, record, index, before)

    return submit_one_by_one(record, indices, active, prepare_run, session.store, backends)


def prepared_run(
    session: Session, record: SweepRecord, index: int, before: Sequence[JobRecord] = ()
) -> Prepared:
    from gptctl.cli.submit import template_places
    from gptctl.jobs.submit import prepare, this_site
    from gptctl.jobs.sweep_submit import sweep_conditions

    checked = checked_run(record, index, before)
    # The sweep may be resumed from another folder.
    site = this_site()._replace(folder=record.folder)
    prepared = prepare(
        checked,
        session.store,
        session.backends,
        site,
        templates=template_places(None, checked.path),
        conditions=sweep_conditions(record, checked.cluster.traits.has_queue),
    )
    return prepared._replace(sweep=record.id, sweep_index=index)


def unfinished(session: Session, jobs: Sequence[JobRecord]) -> list[JobRecord]:
    from gptctl.jobs.state import is_final

    return [job for job in jobs if not is_final(session.state_of(job))]


def announce(record: SweepRecord, done: Sequence[SubmittedRun], as_json: bool) -> int:
    from gptctl.cli import ui

    jobs = [{"run": each.number, "job": each.record.id} for each in done if each.record]
    problems = [f"run {each.number}: {each.problem}" for each in done if each.problem]
    if as_json:
        ui.print_json({"sweep": record.id, "jobs": jobs, "problems": problems})
    else:
        rows = [
            ("runs", f"{len(jobs)} of {len(record.runs)} submitted"),
            ("at once", str(record.parallel or "as many as fit")),
            ("show", f"gptctl sweep show {record.id}"),
        ]
        ui.print_pairs(f"sweep {record.id}", rows)
    for problem in problems:
        ui.say(f"error: {problem}")
    if any(each.record is None for each in done):
        ui.say(f"hint: submit the rest later: gptctl sweep resume {record.id}")
        return ANSWER_IS_NO
    return 0


@sweep.command("list", epilog=examples("gptctl sweep list", "gptctl sweep list --json"))
@as_json_option
@click.pass_obj
def list_sweeps(session: Session, as_json: bool) -> None:
    """List sweeps.

    The newest sweep comes last.
    """
    from gptctl.cli import ui
    from gptctl.jobs.sweeps import SweepStore
    from gptctl.text import clock_time, count

    sweeps = SweepStore().all()
    if as_json:
        ui.print_json(
            [
                {"sweep": each.id, "runs": len(each.runs), "parallel": each.parallel}
                | {"file": each.file, "created": each.created}
                for each in sweeps
            ]
        )
        return
    cells = [[each.id, len(each.runs), clock_time(each.created), each.file] for each in sweeps]
    ui.print_table(count(len(cells), "sweep"), ["sweep", "runs", "created", "file"], cells)


@sweep.command(
    epilog=examples("gptctl sweep show", "gptctl sweep show lr-3f9a2c --metric valid_loss --plot")
)
@sweep_argument
@click.option("--metric", metavar="NAME", help="Compare by this metric, not by the file's.")
@click.option("--plot", "with_plot", is_flag=True, help="Draw the curves of all runs, too.")
@as_json_option
@click.pass_obj
def show(
    session: Session, name: str | None, metric: str | None, with_plot: bool, as_json: bool
) -> None:
    """Show the runs of a sweep and their results, the best one first.

    Without SWEEP: your latest sweep. The result of a run is the last value of its metric.
    """
    from gptctl.cli import ui
    from gptctl.jobs.sweeps import SweepStore, best_first, members
    from gptctl.spec.sweep import varied

    record = SweepStore().find(name)
    metric = metric or record.metric
    rows = best_first(
        [member_row(session, each, metric) for each in members(record, session.store)], record.goal
    )
    best = next((row for row in rows if row["value"] is not None), None)
    if as_json:
        ui.print_json({"sweep": record.id, "metric": metric, "best": best, "runs": rows})
        return
    keys = varied(record.runs)
    cells = [
        [
            row["run"],
            *(row["values"].get(key, "") for key in keys),
            row["job"] or "",
            row["state"],
            "" if row["step"] is None else row["step"],
            "" if row["value"] is None else f"{row['value']:.6g}",
        ]
        for row in rows
    ]
    ui.print_table(f"sweep {record.id}", ["run", *keys, "job", "state", "step", metric], cells)
    if best:
        values = described(best["values"])
        ui.say(f"best {metric}: {best['value']:.6g}, run {best['run']} ({values}): {best['job']}")
    if with_plot:
        draw([row["job"] for row in rows if row["job"]], metric, session)


def member_row(session: Session, member: Any, metric: str) -> dict[str, Any]:
    from gptctl.jobs.resume import lineage
    from gptctl.jobs.run_metrics import whole_run
    from gptctl.logs.measured import is_number

    row = {"run": member.number, "values": dict(member.run), "job": None, "state": "NOT SUBMITTED"}
    if member.job is None:
        return {**row, "reason": "", "step": None, "value": None}
    state = session.state_of(member.job)
    measured = [
        (each["step"], each[metric])
        for each in whole_run(lineage(member.job, session.store))
        if is_number(each.get(metric))
    ]
    step, value = measured[-1] if measured else (None, None)
    known = {"job": member.job.id, "state": state.state, "reason": state.reason}
    return {**row, **known, "step": step, "value": value}


def draw(jobs: list[str], metric: str, session: Session) -> None:
    from gptctl.cli import ui
    from gptctl.cli.plot import chart_of, curves_of, run_of

    curves = [curve for job in jobs for curve in curves_of(run_of(session, job), metric)]
    if curves:
        ui.print_exactly(chart_of(curves, (metric,)))


@sweep.command(epilog=examples("gptctl sweep resume lr-3f9a2c", "gptctl sweep resume lr --json"))
@click.argument("name", metavar="SWEEP")
@as_json_option
@click.pass_obj
def resume(session: Session, name: str, as_json: bool) -> int:
    """Submit the runs of a sweep that did not complete.

    These are runs without a job, and runs whose job ended in another way. A run that saved a
    checkpoint continues from it. Runs that are pending or running stay as they are.
    """
    from gptctl.cli import ui
    from gptctl.engine.run_folder import COMPLETED
    from gptctl.jobs.state import is_final
    from gptctl.jobs.sweeps import SweepStore, members

    record = SweepStore().find(name)
    known = members(record, session.store)
    states = {each.number: session.state_of(each.job) for each in known if each.job}
    fresh = [each.number for each in known if each.job is None]
    failed = [
        each
        for each in known
        if each.job and is_final(states[each.number]) and states[each.number].state != COMPLETED
    ]
    if not fresh and not failed:
        ui.say("nothing to submit: every run is complete, pending or running")
    done = continue_runs(session, record, failed) if failed else []
    if fresh and all(each.record for each in done):
        done = [*done, *submit_runs(session, record, fresh)]
    return announce(record, done, as_json)


def continue_runs(
    session: Session, record: SweepRecord, failed: Sequence[Any]
) -> list[SubmittedRun]:
    from gptctl.jobs.sweep_submit import submit_one_by_one
    from gptctl.jobs.sweeps import members

    jobs = {each.number: each.job for each in failed}
    active = unfinished(session, [each.job for each in members(record, session.store) if each.job])

    def prepare_run(index: int, before: Sequence[JobRecord]) -> Prepared:
        return continued_run(session, record, jobs[index], before)

    return submit_one_by_one(
        record, list(jobs), active, prepare_run, session.store, session.backends
    )


def continued_run(
    session: Session, record: SweepRecord, job: JobRecord, before: Sequence[JobRecord]
) -> Prepared:
    """The run again: from its newest checkpoint if it has one, else from the start."""
    from gptctl.jobs.rerun import Changes, prepare_rerun
    from gptctl.jobs.resume import find_resume_point
    from gptctl.jobs.sweep_submit import sweep_conditions

    try:
        find_resume_point(job, session.store, session.backends)
        can_resume = True
    except UserError:
        can_resume = False
    changes = Changes(waiting((), before), resume=can_resume)
    prepared = prepare_rerun(
        job,
        session.store,
        session.backends,
        changes,
        lambda checked: sweep_conditions(record, checked.cluster.traits.has_queue),
    )
    return prepared._replace(sweep=record.id, sweep_index=job.sweep_index)


@sweep.command(
    epilog=examples("gptctl sweep cancel lr-3f9a2c", "gptctl sweep cancel lr-3f9a2c --now")
)
@click.argument("name", metavar="SWEEP")
@click.option("--now", is_flag=True, help="Kill the ranks at once; save no checkpoints.")
@as_json_option
@click.pass_obj
def cancel(session: Session, name: str, now: bool, as_json: bool) -> int:
    """Stop all runs of a sweep that have not ended."""
    from gptctl.cli import ui
    from gptctl.cli.jobs import cancel_records
    from gptctl.jobs.state import may_run
    from gptctl.jobs.sweeps import SweepStore, members

    record = SweepStore().find(name)
    jobs = [each.job for each in members(record, session.store) if each.job]
    # The ones that wait come first: otherwise they would start as others end.
    running = [job for job in reversed(jobs) if may_run(job, session.backends)]
    if not running:
        ui.say(f"no run of {record.id} is pending or running")
    return cancel_records(session, running, now, as_json)
