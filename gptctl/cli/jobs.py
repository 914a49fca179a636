"""The verbs that start jobs and look after them. As in `cli.py`, everything a verb needs is imported by the verb."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.clusters import clusters
from gptctl.cli.doctor import doctor
from gptctl.cli.hosts import fetch, hosts
from gptctl.cli.logs import logs, say_what_is_missing
from gptctl.cli.options import (
    INTERRUPTED,
    ScriptCommand,
    as_json_option,
    check_job,
    complete_job,
    config_options,
    examples,
    job_argument,
    launch_options,
)
from gptctl.cli.wait import wait, wait_for
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord, Store
    from gptctl.jobs.submit import Prepared
    from gptctl.spec.check import Checked


def open_store() -> Store:
    """The job store, after settling what a killed gptctl may have left."""
    from gptctl.cli import ui
    from gptctl.jobs.store import Store
    from gptctl.jobs.submit import sweep

    store = Store()
    for note in sweep(store):
        ui.say(f"note: {note}")
    return store


def say_damaged(store: Store) -> None:
    from gptctl.cli import ui

    for note in store.damaged:
        ui.say(f"note: {note}")


def find_job(name: str | None, store: Store | None = None) -> JobRecord:
    """A job by its id; without one the latest, and it is said which."""
    from gptctl.cli import ui

    store = store or open_store()
    try:
        record = store.find(name)
    finally:
        say_damaged(store)
    if name is None:
        ui.say(f"job {record.id}")
    return record


def require_folder(record: JobRecord) -> None:
    if not record.run_folder.is_dir():
        raise UserError(f"the folder of {record.id} is gone: {record.run_dir}", "", OUT_OF_REACH)


def template_places(template: str | None, config: Path | None) -> list[Path]:
    """The user's templates: the one that was named, then a folder `templates` beside the config."""
    if template is not None and not Path(template).exists():
        raise UserError(
            f"there is no template {template}",
            "name a file such as launch.sh.j2, or a folder",
            WRONG_USAGE,
        )
    beside = config.parent / "templates" if config else None
    places = [
        *([Path(template)] if template else []),
        *([beside] if beside and any(beside.glob("*.j2")) else []),
    ]
    if template and Path(template).is_dir() and not any(Path(template).glob("*.j2")):
        raise UserError(
            f"{template} holds no templates", "put a file such as launch.sh.j2 there", WRONG_USAGE
        )
    return places


def refuse_invalid(checked: Checked, what: str) -> None:
    if not checked.is_valid:
        raise UserError(f"{checked.name} {what}", findings=checked.findings)


@click.command(
    cls=ScriptCommand,
    epilog=examples(
        "gptctl submit --nodes 2 --follow",
        "gptctl submit --nodes 2 --gpus-per-node 8 -- train.py --batch_size 32 10 5",
    ),
)
@config_options
@launch_options
@click.option("--resume", metavar="JOB", help="Go on from the newest checkpoint of that job.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run, and start nothing.")
@click.option(
    "-f", "--follow", is_flag=True, help="Then follow its logs; the exit code is the job's verdict."
)
@click.option(
    "--wait",
    "wait_for_it",
    is_flag=True,
    help="Then wait for its end; the exit code is the job's verdict.",
)
@as_json_option
def submit(
    resume: str | None,
    dry_run: bool,
    follow: bool,
    wait_for_it: bool,
    as_json: bool,
    template: str | None,
    **arguments: Any,
) -> int:
    """Check a run config, freeze everything the job needs, and start it.

    CONFIG is a path or a bare name, as for validate; without one, config.yaml is looked for. After `--` stands any
    script with its arguments, instead of the bundled trainer; it needs no config, and uses one only if it is named.
    Nothing is written when something is wrong. Nothing old is overwritten: every job has a folder of its own.
    """
    from gptctl.jobs.submit import prepare, this_site

    if dry_run and (follow or wait_for_it):
        raise UserError("nothing runs in a dry run", "leave out --follow and --wait", WRONG_USAGE)
    store = open_store()
    if resume is not None:
        arguments["overrides"] += (f"Engine.save_load.ckpt_dir={resumable_output(resume, store)}",)
    checked, overrides = check_job(**arguments)
    prepared = prepare(
        checked, store, this_site(), overrides, template_places(template, checked.path)
    )
    if dry_run:
        show_dry_run(prepared, as_json)
        return 0
    return send_and_stay(prepared, store, as_json, follow, wait_for_it)


def send_and_stay(
    prepared: Prepared, store: Store, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs import report as job_report
    from gptctl.jobs.submit import Interrupted
    from gptctl.jobs.submit import submit as send

    ui.print_findings(prepared.findings, to_stderr=True)
    try:
        record = send(prepared, store)
    except Interrupted as interrupted:
        record = interrupted.record
        if not interrupted.reason:
            ui.say(job_report.goes_on(record))
            return INTERRUPTED
        ui.say(f"warning: {record.id} was started, but not all went well: {interrupted.reason}")
    return accompany(prepared, record, as_json, follow, wait_for_it)


def announce(prepared: Prepared, record: JobRecord, as_json: bool, **ending: str) -> None:
    from gptctl.cli import ui
    from gptctl.engine.run_folder import RunFolder
    from gptctl.jobs import report as job_report
    from gptctl.spec.summary import count

    plan = prepared.plan
    endpoint = RunFolder(record.run_dir).endpoint()
    facts = {**job_report.submitted(record, endpoint), **ending}
    if as_json:
        ui.print_json(facts)
        return
    first = f"{plan.master_addr or 'the first host that Slurm gives it'}:{plan.master_port or '(a free port)'}"
    shown = [
        (
            "world",
            f"{count(plan.world, 'rank')}: {plan.nnodes} × {plan.per_node} on cluster {plan.cluster}",
        ),
        ("scheduler", f"{plan.kind} job {facts['scheduler_id']}" if facts["scheduler_id"] else ""),
        (
            "endpoint",
            f"{endpoint or first}, {plan.form} rendezvous{f' {plan.rdzv_id}' if plan.form == 'c10d' else ''}",
        ),
        ("logs", record.log_dir),
        ("follow", facts["follow"]),
    ]
    ui.print_pairs(f"job {record.id}", [(name, text) for name, text in shown if text])


def accompany(
    prepared: Prepared, record: JobRecord, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    """Says what was submitted, and stays with it if that was asked for. An interrupt leaves the job alone."""
    from gptctl.cli import ui
    from gptctl.cli.follow import follow_job
    from gptctl.jobs import report as job_report
    from gptctl.logs.files import Wanted
    from gptctl.logs.stream import Lines

    try:
        if as_json and wait_for_it and not follow:  # one object, when all of it is known
            code = wait_for(record, None, quiet=True)
            announce(prepared, record, as_json, **job_report.state_of(record)._asdict())
            return code
        announce(prepared, record, as_json)
        if follow:
            return follow_job(
                record, Wanted(all_attempts=True), Lines(), "json" if as_json else "text"
            )
        return wait_for(record, None) if wait_for_it else 0
    except KeyboardInterrupt:
        ui.say(job_report.goes_on(record))
        return INTERRUPTED


def show_dry_run(prepared: Prepared, as_json: bool) -> None:
    from gptctl.cli import ui

    plan = prepared.plan
    if as_json:
        ui.print_json({"plan": plan.as_json(), "scripts": prepared.scripts})
        return
    ui.print_findings(prepared.findings, to_stderr=True)
    for name, text in prepared.scripts.items():
        ui.say(f"# {plan.run_dir}/{name}, on {plan.nnodes} node(s) of cluster {plan.cluster}:")
        ui.print_exactly(text)


def resumable_output(job: str, store: Store) -> str:
    from gptctl.backends import backend_of
    from gptctl.jobs import report as job_report

    record = find_job(job, store)
    if not record.output_dir:
        raise UserError(
            f"{record.id} ran a script of its own", "only the bundled trainer resumes", WRONG_USAGE
        )
    if not job_report.is_final(job_report.state_of(record)):
        raise UserError(f"{record.id} has not ended", f"gptctl cancel {record.id}", ANSWER_IS_NO)
    folder, names = backend_of(record.kind).output(record)
    if not any(name.startswith("step_") for name in names):
        raise UserError(
            f"{record.id} has left no checkpoint in {folder}", "submit without --resume"
        )
    return folder


@click.command(
    cls=ScriptCommand,
    epilog=examples(
        "gptctl render config --style standalone --gpus-per-node 4",
        "gptctl render --cluster a800 --nodes 2 --style sbatch > sbatch_run.sh",
    ),
)
@config_options
@launch_options
@click.option("--node", type=click.IntRange(min=0), help="Static: only the command of this node.")
@as_json_option
def render(node: int | None, as_json: bool, template: str | None, **arguments: Any) -> None:
    """Print the command line or script that launches a config, for pasting, srun or sbatch.

    Styles: standalone, c10d, static, launch (torch.distributed.launch); on a Slurm cluster also srun-script, sbatch and
    loop. Everything runs in place: no job, no run folder, the files as they are then.
    """
    from gptctl.cli import ui
    from gptctl.jobs.submit import this_site
    from gptctl.planning.build import build_plan
    from gptctl.planning.render import render as rendered
    from gptctl.planning.render import script_of

    checked, overrides = check_job(**arguments)
    refuse_invalid(checked, "is not rendered")
    plan = build_plan(checked, this_site(), overrides=overrides)
    if node is not None and node >= plan.nodes:
        raise UserError(f"there is no node {node}", f"use 0 to {plan.nodes - 1}", WRONG_USAGE)
    text = rendered(plan, script_of(plan.style), template_places(template, checked.path), node)
    if as_json:
        ui.print_json({"style": plan.style, "plan": plan.as_json(), "text": text})
    else:
        ui.print_findings(checked.findings, to_stderr=True)
        ui.print_exactly(text)


@click.command("list", epilog=examples("gptctl list", "gptctl list --json"))
@click.option("--all", "show_all", is_flag=True, help="Older jobs too, not only the last 20.")
@as_json_option
def list_jobs(show_all: bool, as_json: bool) -> None:
    """List jobs with their states, oldest first."""
    from gptctl.cli import ui
    from gptctl.jobs import report as job_report
    from gptctl.spec.summary import count

    store = open_store()
    rows = job_report.rows(store.records(None if show_all else 20))
    say_damaged(store)
    if as_json:
        ui.print_json(rows)
        return
    for row in rows:
        row["ranks"] = f"{row['nodes']} × {row['world_size'] // row['nodes']}"
        row["when"] = job_report.when(row["created"])
    cells = [
        [row[key] for key in ("job", "state", "ranks", "cluster", "when", "reason")] for row in rows
    ]
    hidden = len(store.ids()) - len(rows)
    older = f"; {count(hidden, 'older one')} with --all" if hidden else ""
    ui.print_table(
        f"{count(len(rows), 'job')}{older}",
        ["job", "state", "ranks", "cluster", "created", "reason"],
        cells,
    )


@click.command(epilog=examples("gptctl status", "gptctl status gpt-3f9a2c --json"))
@job_argument(required=False)
@as_json_option
def status(job: str | None, as_json: bool) -> None:
    """Show how a job stands; without JOB the latest."""
    from gptctl.cli import ui
    from gptctl.jobs import report as job_report

    record = find_job(job)
    say_what_is_missing(record)
    facts = job_report.status(record)
    ui.print_json(facts) if as_json else ui.print_pairs(f"job {record.id}", job_report.pairs(facts))


@click.command(epilog=examples("gptctl show gpt-3f9a2c", "gptctl show gpt-3f9a2c Launch.env"))
@job_argument(required=True)
@click.argument("prefix", required=False)
@click.option("--script", "show_script", is_flag=True, help="Print its scripts.")
@as_json_option
def show(job: str, prefix: str | None, show_script: bool, as_json: bool) -> None:
    """Show what a job was started with: state, files, ranks, and every value with where it came from.

    PREFIX lists the config's keys below it, such as Launch or Optimizer.lr, and the variables of the environment.
    """
    from gptctl.cli import ui
    from gptctl.engine.run_folder import read_json
    from gptctl.jobs import report as job_report

    record = find_job(job)
    require_folder(record)
    if show_script:
        ui.print_exactly("\n".join(job_report.scripts(record)))
        return
    values = job_report.origins(record, prefix or "")
    if prefix is not None and not values:
        raise UserError(
            f"no key of {record.id} starts with {prefix}", "`gptctl keys` lists them", WRONG_USAGE
        )
    if as_json:
        plan, git = (read_json(record.run_folder / name) for name in ("plan.json", "git.json"))
        config = [{"key": key, "value": value, "origin": origin} for key, value, origin in values]
        ui.print_json({**job_report.status(record), "plan": plan, "git": git, "values": config})
        return
    if prefix is None:
        ui.print_pairs(f"job {record.id}", job_report.pairs(job_report.status(record)))
        values = [row for row in values if row[2] not in ("default", "")]
    cells = [[key, "" if value is None else value, origin] for key, value, origin in values]
    ui.print_table("values", ["key", "value", "from"], cells)


@click.command(epilog=examples("gptctl cancel gpt-3f9a2c", "gptctl cancel gpt-3f9a2c --now"))
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--now", is_flag=True, help="Give it no time to save.")
@as_json_option
def cancel(jobs: tuple[str, ...], now: bool, as_json: bool) -> int:
    """End jobs and all of their processes. The trainer saves a checkpoint first, for which it has 30 seconds."""
    from gptctl.backends import backend_of
    from gptctl.cli import ui
    from gptctl.jobs import report as job_report

    store = open_store()
    records = [find_job(job, store) for job in jobs]
    answers = []
    problems: list[UserError] = []
    for record in records:
        if job_report.may_run(record):
            ui.say(f"ending {record.id} …")
            try:
                backend_of(record.kind).cancel(record, now)
            except UserError as error:  # the others are ended all the same
                problems.append(error)
        answers.append({"job": record.id, "state": job_report.state_of(record).state})
    if as_json:
        ui.print_json(answers)
    else:
        ui.print_text("\n".join(f"{answer['job']}: {answer['state']}" for answer in answers))
    for problem in problems:
        ui.print_error(problem)
    return max((problem.exit_code for problem in problems), default=0)


@click.command(
    epilog=examples(
        "gptctl rerun gpt-3f9a2c --follow", "gptctl rerun gpt-3f9a2c -o Engine.max_steps=2000"
    )
)
@job_argument(required=True)
@click.option(
    "-o",
    "--override",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a key; repeatable.",
)
@click.option("-f", "--follow", is_flag=True, help="Then follow its logs.")
@click.option("--wait", "wait_for_it", is_flag=True, help="Then wait for its end.")
@as_json_option
def rerun(
    job: str, overrides: tuple[str, ...], follow: bool, wait_for_it: bool, as_json: bool
) -> int:
    """Submit a job again from its saved files: the same config, cluster profile and code, in a new run folder."""
    from gptctl.jobs.submit import prepare_rerun
    from trainer.config import Override

    store = open_store()
    prepared = prepare_rerun(
        find_job(job, store), store, [Override.parse(text) for text in overrides]
    )
    return send_and_stay(prepared, store, as_json, follow, wait_for_it)


VERBS = [
    submit,
    render,
    logs,
    list_jobs,
    status,
    show,
    cancel,
    wait,
    rerun,
    fetch,
    clusters,
    hosts,
    doctor,
]
