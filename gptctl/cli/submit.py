"""The verbs that start jobs, or print how to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import (
    LaunchCommand,
    as_json_option,
    check_job,
    config_options,
    examples,
    job_argument,
    launch_options,
    override_option,
)
from gptctl.cli.session import Session
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord
    from gptctl.jobs.submit import Prepared
    from gptctl.spec.check import Checked

follow_option = click.option(
    "-f", "--follow", is_flag=True, help="Follow its logs; exit with the job's status."
)
wait_option = click.option(
    "--wait", "wait_for_it", is_flag=True, help="Wait for its end; exit with the job's status."
)


@click.command(
    cls=LaunchCommand,
    epilog=examples(
        "gptctl submit --nodes 2 --follow",
        "gptctl submit config --cluster a800 --nodes 4 --time 12:00:00 --dry-run",
        "gptctl submit --nodes 2 --gpus-per-node 8 -- train.py --batch_size 32 10 5",
    ),
)
@config_options
@launch_options
@click.option("--resume", metavar="JOB", help="Start from the newest checkpoint of that job.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; start nothing.")
@follow_option
@wait_option
@as_json_option
@click.pass_obj
def submit(
    session: Session,
    /,
    resume: str | None,
    dry_run: bool,
    follow: bool,
    wait_for_it: bool,
    as_json: bool,
    template: str | None,
    **arguments: Any,
) -> int:
    """Check a run config, freeze what the job needs, and start it.

    CONFIG is a path or a bare name, as for validate; the default is config.yaml. To run a script
    of your own instead of the bundled trainer, write it and its arguments after `--`; it needs no
    config. If anything is wrong, nothing is written. Every job gets a folder of its own.
    """
    from gptctl.jobs.submit import prepare, this_site

    if dry_run and (follow or wait_for_it):
        raise UserError("a dry run starts nothing", "omit --follow and --wait", WRONG_USAGE)
    if resume is not None:
        checkpoints = resumable_output(resume, session)
        arguments["overrides"] += (f"Engine.save_load.ckpt_dir={checkpoints}",)
    checked, overrides = check_job(session, **arguments)
    templates = template_places(template, checked.path)
    prepared = prepare(checked, session.store, session.backends, this_site(), overrides, templates)
    if dry_run:
        show_dry_run(prepared, as_json)
        return 0
    return send_and_stay(session, prepared, as_json, follow, wait_for_it)


@click.command(
    cls=LaunchCommand,
    epilog=examples(
        "gptctl render config --style standalone --gpus-per-node 4",
        "gptctl render --cluster a800 --nodes 2 --style sbatch > sbatch_run.sh",
    ),
)
@config_options
@launch_options
@click.option("--node", type=click.IntRange(min=0), help="Static: print this node's command only.")
@as_json_option
@click.pass_obj
def render(
    session: Session, /, node: int | None, as_json: bool, template: str | None, **arguments: Any
) -> None:
    """Print the command line or script that launches a config.

    Styles: standalone, c10d, static, launch (torch.distributed.launch); on a Slurm cluster also
    srun-script, sbatch and loop. The script runs your files in place: there is no job and no run
    folder.
    """
    from gptctl.cli import ui
    from gptctl.jobs.submit import this_site
    from gptctl.planning.render import render as rendered
    from gptctl.planning.render import script_of

    checked, overrides = check_job(session, **arguments)
    refuse_invalid(checked, "is not rendered")
    backend = session.backends.of(checked.cluster.kind)
    plan = backend.plan(checked, this_site(), overrides=overrides)
    if node is not None and node >= plan.nodes:
        raise UserError(f"there is no node {node}", f"use 0 to {plan.nodes - 1}", WRONG_USAGE)
    text = rendered(plan, script_of(plan.style), template_places(template, checked.path), node)
    if as_json:
        ui.print_json({"style": plan.style, "plan": plan.as_json(), "text": text})
    else:
        ui.print_findings(checked.findings, to_stderr=True)
        ui.print_exactly(text)


@click.command(
    cls=LaunchCommand,
    epilog=examples(
        "gptctl rerun gpt-3f9a2c --follow", "gptctl rerun gpt-3f9a2c -o Engine.max_steps=2000"
    ),
)
@job_argument(required=True)
@override_option
@follow_option
@wait_option
@as_json_option
@click.pass_obj
def rerun(
    session: Session,
    job: str,
    overrides: tuple[str, ...],
    follow: bool,
    wait_for_it: bool,
    as_json: bool,
    script: tuple[str, ...],
) -> int:
    """Submit a job again from its saved files.

    The new job has the same config, cluster profile and code, and a run folder of its own.
    """
    from gptctl.jobs.rerun import prepare_rerun
    from trainer.config import Override

    if script:
        raise UserError("rerun takes no script", "use -o Launch.args=…", WRONG_USAGE)
    typed = [Override.parse(text) for text in overrides]
    record = session.find(job)
    prepared = prepare_rerun(record, session.store, session.backends, typed)
    return send_and_stay(session, prepared, as_json, follow, wait_for_it)


def template_places(template: str | None, config: Path | None) -> list[Path]:
    """The user's templates: the one that was named, then a folder `templates` beside the config."""
    if template is not None and not Path(template).exists():
        hint = "name a file such as launch.sh.j2, or a folder"
        raise UserError(f"there is no template {template}", hint, WRONG_USAGE)
    if template and Path(template).is_dir() and not any(Path(template).glob("*.j2")):
        hint = "put a file such as launch.sh.j2 there"
        raise UserError(f"{template} contains no templates", hint, WRONG_USAGE)
    beside = config.parent / "templates" if config else None
    named = [Path(template)] if template else []
    return [*named, *([beside] if beside and any(beside.glob("*.j2")) else [])]


def refuse_invalid(checked: Checked, what: str) -> None:
    if not checked.is_valid:
        raise UserError(f"{checked.name} {what}", findings=checked.findings)


def resumable_output(job: str, session: Session) -> str:
    record = session.find(job)
    if not record.output_dir:
        hint = "only the bundled trainer can resume"
        raise UserError(f"{record.id} ran a script of its own", hint, WRONG_USAGE)
    if not session.is_over(record):
        raise UserError(f"{record.id} has not ended", f"gptctl cancel {record.id}", ANSWER_IS_NO)
    folder, names = session.backend_of(record).checkpoints(record)
    if not any(name.startswith("step_") for name in names):
        hint = "submit without --resume"
        raise UserError(f"{record.id} left no checkpoint in {folder}", hint)
    return folder


def show_dry_run(prepared: Prepared, as_json: bool) -> None:
    from gptctl.cli import ui

    plan = prepared.plan
    if as_json:
        ui.print_json({"plan": plan.as_json(), "scripts": prepared.scripts})
        return
    ui.print_findings(prepared.findings, to_stderr=True)
    for name, text in prepared.scripts.items():
        where = f"on {plan.nnodes} node(s) of cluster {plan.cluster}"
        ui.say(f"# {plan.remote_dir}/{name}, {where}:")
        ui.print_exactly(text)


def send_and_stay(
    session: Session, prepared: Prepared, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs import report
    from gptctl.jobs.submit import submit as send

    ui.print_findings(prepared.findings, to_stderr=True)
    sent = send(prepared, session.store, session.backends)
    if sent.was_interrupted:
        ui.say(report.still_running(sent.record))
        return INTERRUPTED
    if sent.problem:
        ui.say(f"warning: {sent.record.id} was started, but there was a problem: {sent.problem}")
    return accompany(session, prepared, sent.record, as_json, follow, wait_for_it)


def accompany(
    session: Session,
    prepared: Prepared,
    record: JobRecord,
    as_json: bool,
    follow: bool,
    wait_for_it: bool,
) -> int:
    """Print what was submitted, and stay with it if asked to. An interrupt leaves the job alone."""
    from gptctl.cli import ui
    from gptctl.cli.follow import follow_job
    from gptctl.cli.jobs import wait_for
    from gptctl.jobs import report
    from gptctl.logs.files import Wanted
    from gptctl.logs.stream import Lines

    try:
        if as_json and wait_for_it and not follow:  # one object, when all of it is known
            code = wait_for(session, record, None, quiet=True)
            announce(prepared, record, as_json, **session.state_of(record)._asdict())
            return code
        announce(prepared, record, as_json)
        if follow:
            style = "json" if as_json else "text"
            return follow_job(session, record, Wanted(all_attempts=True), Lines(), style)
        return wait_for(session, record, None) if wait_for_it else 0
    except KeyboardInterrupt:
        ui.say(report.still_running(record))
        return INTERRUPTED


def announce(prepared: Prepared, record: JobRecord, as_json: bool, **ending: str) -> None:
    from gptctl.cli import ui
    from gptctl.engine.run_folder import RunFolder
    from gptctl.jobs import report
    from gptctl.text import count

    plan = prepared.plan
    endpoint = RunFolder(record.local_dir).endpoint()
    facts = {**report.submitted(record, endpoint), **ending}
    if as_json:
        ui.print_json(facts)
        return
    later = (
        f"{plan.master_addr or 'the first allocated host'}:{plan.master_port or '(a free port)'}"
    )
    rendezvous = f"{plan.form} rendezvous{f' {plan.rdzv_id}' if plan.form == 'c10d' else ''}"
    ranks = f"{count(plan.world, 'rank')}: {plan.nnodes} × {plan.per_node}"
    shown = [
        ("world", f"{ranks} on cluster {plan.cluster}"),
        ("scheduler", f"{plan.kind} job {facts['scheduler_id']}" if facts["scheduler_id"] else ""),
        ("endpoint", f"{endpoint or later}, {rendezvous}"),
        ("logs", record.log_dir),
        ("follow", facts["follow"]),
    ]
    ui.print_pairs(f"job {record.id}", [(name, text) for name, text in shown if text])
