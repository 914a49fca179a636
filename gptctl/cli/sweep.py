"""The verbs for sweeps: many runs of one config, compared by a metric.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import (
    LaunchCommand,
    as_json_option,
    examples,
    label_options,
    launch_options,
    layout_options,
    trust_option,
)
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column
from gptctl.cli.trusting import show_doubts
from trainer.errors import UserError

if TYPE_CHECKING:
    from gptctl.jobs.sweep_submit import SubmittedRun
    from gptctl.jobs.sweeps import SweepMember, SweepRecord
    from gptctl.spec.trust import Source

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
@label_options
@click.option("--parallel", type=click.IntRange(1), metavar="N", help="Run at most N jobs at once.")
@click.option("--skip-invalid", is_flag=True, help="Leave out runs whose config is invalid.")
@click.option("--dry-run", is_flag=True, help="Print the runs; start nothing.")
@trust_option
@as_json_option
@click.pass_obj
def submit(
    session: Session,
    /,
    file: str,
    parallel: int | None,
    skip_invalid: bool,
    dry_run: bool,
    trust: bool,
    as_json: bool,
    template: str | None,
    tags: tuple[str, ...],
    note: str | None,
    **arguments: Any,
) -> int:
    """Submit all runs of a sweep file.

    The file lists config keys with their values: a grid, a list of runs, or ranges from which
    values are drawn. All runs are checked before the first one is submitted.
    """
    from gptctl.cli.sweep_runs import planned_sweep, refuse_templates
    from gptctl.jobs.labels import parse_labels

    refuse_templates(template)
    labels = parse_labels(tags, note)
    described, sources = planned_sweep(session, Path(file), parallel, arguments)
    described = described._replace(**labels._asdict())
    planned = startable(described, skip_invalid)
    if dry_run:
        show_doubts(sources, trust)
        print_runs(planned, as_json)
        return 0
    return announce(*submit_sweep(session, planned, sources, trust), as_json)


def startable(planned: SweepRecord, skip_invalid: bool) -> SweepRecord:
    """Check all runs together; leave out invalid ones if asked to, else refuse them."""
    from gptctl.cli import ui
    from gptctl.cli.sweep_runs import checked_runs, described, distinct, refusal
    from gptctl.spec.sweep_checks import check_runs

    checks = checked_runs(planned)
    wrong = {index for index, checked in enumerate(checks) if not checked.is_valid}
    if wrong and not (skip_invalid and len(wrong) < len(checks)):
        raise refusal(planned, checks, sorted(wrong))
    if found := [*check_runs(checks)]:
        raise UserError("the sweep was not submitted", findings=found)
    valid = [checked for checked in checks if checked.is_valid]
    ui.print_findings(distinct([each for one in valid for each in one.findings]), to_stderr=True)
    for index in sorted(wrong):
        ui.say(f"run {index} is left out: {described(planned.runs[index])}: invalid config")
    # Invalid runs are not part of the sweep, so that it can be complete.
    kept = tuple(run for index, run in enumerate(planned.runs) if index not in wrong)
    return planned._replace(runs=kept)


def print_runs(planned: SweepRecord, as_json: bool) -> None:
    from gptctl.cli import ui
    from gptctl.spec.sweep import varied
    from gptctl.text import count

    if as_json:
        ui.print_json([{"run": index, **run} for index, run in enumerate(planned.runs)])
        return
    keys = varied(planned.runs)
    cells = [[index, *map(run.get, keys)] for index, run in enumerate(planned.runs)]
    ui.print_table(count(len(cells), "run"), [Column("run"), *parameter_columns(keys)], cells)


def parameter_columns(keys: Sequence[str]) -> list[Column]:
    """A column for each parameter. A terminal gets short names, and as many as fit."""
    from gptctl.spec.sweep import short_names

    names = short_names(keys) if sys.stdout.isatty() else keys
    # The first one is always shown.
    return [Column(name, importance=at) for at, name in enumerate(names)]


def result_columns(keys: Sequence[str], metric: str) -> list[Column]:
    """The columns of `sweep show`; `reason` of a run is in its JSON and in `gptctl status`."""
    first, rest = parameter_columns(keys)[:2], parameter_columns(keys)[2:]
    return [
        Column("run"),
        *first,
        # State and job are of more use than a third parameter.
        *(each._replace(importance=each.importance + 2) for each in rest),
        Column("job", importance=3),
        Column("state", importance=2),
        Column("step", importance=len(keys) + 4),
        Column(metric),
    ]


def submit_sweep(
    session: Session, planned: SweepRecord, sources: Sequence[Source], trust: bool
) -> tuple[SweepRecord, Sequence[SubmittedRun]]:
    from gptctl.cli.sweep_runs import not_submitted, prepared_runs, submit_runs
    from gptctl.cli.trusting import announce_files
    from gptctl.jobs.sweeps import SweepStore, has_jobs
    from gptctl.spec.trust import settle_trust

    sweeps = SweepStore()
    record = sweeps.add(planned)
    with sweeps.locked(record):
        try:
            prepared = prepared_runs(session, record, range(len(record.runs)))
            used = [*sources, *(each for run in prepared.values() for each in run.sources)]
            settle_trust(used, trust)
            announce_files(used)
            done = submit_runs(session, record, prepared, ())
        finally:
            # Nothing was submitted: the same file can be submitted again after a fix.
            if is_empty := not has_jobs(record, session.store):
                sweeps.remove(record)
    if is_empty:
        raise not_submitted(done[0])
    return record, done


def announce(
    record: SweepRecord, done: Sequence[SubmittedRun], as_json: bool, is_resumed: bool = False
) -> int:
    from gptctl.cli import ui

    problems = [f"run {each.number}: {each.problem}" for each in done if each.problem]
    if as_json:
        jobs = [
            {"run": each.number, "job": each.record.id, "from_step": each.step}
            for each in done
            if each.record
        ]
        ui.print_json({"sweep": record.id, "jobs": jobs, "problems": problems})
    elif done:
        ui.print_pairs(f"sweep {record.id}", [*summary_of(record, done, is_resumed)])
    for problem in problems:
        ui.say(f"error: {problem}")
    if refused := [each.error for each in done if each.error]:
        ui.say(f"hint: submit the rest later: gptctl sweep resume {record.id}")
        return refused[0].exit_code
    return 0


def summary_of(
    record: SweepRecord, done: Sequence[SubmittedRun], is_resumed: bool
) -> Iterator[tuple[str, str]]:
    """What was submitted; of a sweep that is resumed, each run with its new job."""
    jobs = [each for each in done if each.record]
    new = "new jobs for " if is_resumed else ""
    yield "runs", f"{new}{len(jobs)} of {len(record.runs)}{'' if is_resumed else ' submitted'}"
    if is_resumed:
        yield from ((f"run {each.number}", start_of(each)) for each in jobs)
    yield "at once", str(record.parallel or "as many as fit")
    yield "show", f"gptctl sweep show {record.id}"


def start_of(run: SubmittedRun) -> str:
    """Which job a run got, and where it begins: `lr-2f1a-3: continues lr-2f1a from step 20`."""
    assert run.record, "only runs that were submitted have a start"
    if run.step is None:
        return f"{run.record.id}: starts from the beginning"
    since = f" from step {run.step}" if run.step else ""
    return f"{run.record.id}: continues {run.record.continues}{since}"


@sweep.command("list", epilog=examples("gptctl sweep list", "gptctl sweep list --json"))
@as_json_option
def list_sweeps(as_json: bool) -> None:
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
@click.option("--metric", metavar="NAME", help="Compare by this metric instead of the file's.")
@click.option("--plot", "with_plot", is_flag=True, help="Also draw the curves of all runs.")
@as_json_option
@click.pass_obj
def show(
    session: Session, name: str | None, metric: str | None, with_plot: bool, as_json: bool
) -> None:
    """Show the runs of a sweep and their results, the best one first.

    Without SWEEP: your latest sweep. The result of a run is the last value of its metric.
    """
    from gptctl.cli import ui
    from gptctl.cli.sweep_runs import described
    from gptctl.jobs.job_status import prefetch_states
    from gptctl.jobs.sweeps import SweepStore, best_first, members
    from gptctl.spec.sweep import varied

    record = SweepStore().find(name)
    metric = metric or record.metric
    known = members(record, session.store)
    prefetch_states([each.job for each in known if each.job], session.backends)
    rows = best_first([member_row(session, each, metric) for each in known], record.goal)
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
    ui.print_table(f"sweep {record.id}", result_columns(keys, metric), cells)
    if best:
        values = described(best["values"])
        found = f"best {metric}: {best['value']:.6g}, run {best['run']} ({values}): {best['job']}"
        ui.say_wrapped(found)
    if with_plot:
        draw([row["job"] for row in rows if row["job"]], metric, session)


def member_row(session: Session, member: SweepMember, metric: str) -> dict[str, Any]:
    from gptctl.jobs.resume import lineage
    from gptctl.jobs.run_metrics import whole_run
    from gptctl.logs.metric_rows import is_number

    row = {"run": member.number, "values": dict(member.run), "job": None, "state": "NOT SUBMITTED"}
    if member.job is None:
        return {**row, "reason": "", "step": None, "value": None}
    state = session.state_of(member.job)
    measured = [
        (each["step"], each[metric])
        for each in whole_run(lineage(member.job, session.store), (metric,))
        if is_number(each.get(metric))
    ]
    step, value = measured[-1] if measured else (None, None)
    known = {"job": member.job.id, "state": state.state, "reason": state.reason}
    return {**row, **known, "step": step, "value": value}


def draw(jobs: list[str], metric: str, session: Session) -> None:
    from gptctl.cli import ui
    from gptctl.cli.plot import chart_of, curves_of, run_of

    curves = [curve for job in jobs for curve in curves_of(run_of(session, job, (metric,)), metric)]
    if curves:
        ui.print_exactly(chart_of(curves, (metric,)))


@sweep.command(epilog=examples("gptctl sweep resume lr-3f9a2c", "gptctl sweep resume lr --json"))
@click.argument("name", metavar="SWEEP")
@trust_option
@as_json_option
@click.pass_obj
def resume(session: Session, name: str, trust: bool, as_json: bool) -> int:
    """Submit the runs of a sweep that did not complete.

    These are runs without a job, and runs whose job ended in another way. A run that saved a
    checkpoint continues from it. Runs that are pending or running stay as they are.
    """
    from gptctl.cli import ui
    from gptctl.cli.sweep_runs import continue_runs, prepared_runs, submit_runs, unfinished
    from gptctl.jobs.job_status import prefetch_states
    from gptctl.jobs.sweeps import SweepStore, members
    from gptctl.spec.trust import settle_trust

    sweeps = SweepStore()
    record = sweeps.find(name)
    # The members are read under the lock: another `sweep resume` may have submitted them.
    with sweeps.locked(record):
        known = members(record, session.store)
        prefetch_states([each.job for each in known if each.job], session.backends)
        fresh, failed = missing_runs(session, known)
        if not fresh and not failed:
            ui.say("nothing to submit: every run is complete, pending or running")
        active = unfinished(session, known)
        prepared = prepared_runs(session, record, fresh)
        settle_trust([each for run in prepared.values() for each in run.sources], trust)
        done = continue_runs(session, record, failed, active) if failed else []
        if fresh and all(each.record for each in done):
            before = [*active, *(each.record for each in done if each.record)]
            done = [*done, *submit_runs(session, record, prepared, before)]
    return announce(record, done, as_json, is_resumed=True)


def missing_runs(
    session: Session, known: Sequence[SweepMember]
) -> tuple[list[int], list[SweepMember]]:
    """The runs that start from the beginning, and those that continue a job that has ended."""
    from gptctl.engine.job_result import COMPLETED
    from gptctl.jobs.state import is_final

    fresh, failed = [], []
    in_doubt = {record.id for record in session.store.pending()}
    for each in known:
        if each.job is None:
            fresh.append(each.number)
            continue
        state = session.state_of(each.job)
        if not is_final(state) or state.state == COMPLETED:
            continue
        # The scheduler did not answer: it may have been started.
        if each.job.id in in_doubt:
            continue
        # Of a removed job nothing is left that could be continued.
        if each.job.run_folder.is_dir():
            failed.append(each)
        else:
            fresh.append(each.number)
    return fresh, failed


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
