"""The verbs that start a config, or print how to start it: submit and render.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import (
    LaunchCommand,
    as_json_option,
    config_options,
    examples,
    follow_option,
    label_options,
    launch_options,
    queue_option,
    trust_option,
    wait_option,
)
from gptctl.cli.overrides import check_job
from gptctl.cli.session import Session
from gptctl.cli.trusting import announce_files, show_doubts
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.cli.chain import Chain
    from gptctl.jobs.resume import ResumePoint
    from gptctl.jobs.store import JobRecord
    from gptctl.jobs.submit import Prepared
    from gptctl.planning.user_templates import UserTemplate
    from gptctl.spec.check import Checked


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
@label_options
@click.option(
    "--resume", metavar="JOB", help="Start this config from the newest checkpoint of that job."
)
@queue_option
@click.option(
    "--chain",
    type=click.IntRange(2, 1000),
    metavar="N",
    help="Submit N jobs, each of which resumes the one before.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run; start nothing.")
@trust_option
@follow_option
@wait_option
@as_json_option
@click.pass_obj
def submit(
    session: Session,
    /,
    resume: str | None,
    queue: bool,
    chain: int | None,
    dry_run: bool,
    trust: bool,
    follow: bool,
    wait_for_it: bool,
    as_json: bool,
    template: str | None,
    tags: tuple[str, ...],
    note: str | None,
    **arguments: Any,
) -> int:
    """Check a run config, freeze what the job needs, and start it.

    CONFIG is a path or a bare name, as for validate; the default is config.yaml. To run your own
    script instead of the bundled trainer, give it and its arguments after `--`, or -m MODULE; it
    needs no config. After `-- -m trainer`, the flags of PaddleNLP's GPT set keys of the config.
    If a check fails, nothing is written. Every job gets its own folder.
    """
    from gptctl.cli.chain import Chain
    from gptctl.cli.dependencies import start_conditions
    from gptctl.jobs.labels import parse_labels
    from gptctl.jobs.submit import prepare, this_site
    from gptctl.planning.user_templates import template_sources
    from gptctl.spec.trust import require_trust, settle_trust

    refuse_contradiction(dry_run, follow, wait_for_it)
    labels = parse_labels(tags, note)
    point = resume_point(session, resume) if resume is not None else None
    more = point.overrides if point else ()
    if chain:
        places = partial(templates_of, template)
        typed = {**arguments, "more": more}
        members = Chain(session, chain, queue, places, typed, point, labels)
        if dry_run:
            show_dry_run(members.first, as_json, trust)
            show_length(members)
            return 0
        settle_trust(members.first.sources, trust)
        return submit_chain(members, session, as_json, follow, wait_for_it)
    checked, overrides = check_job(session, **arguments, more=more)
    templates = templates_of(template, checked.path)
    # A dry run prepares the job exactly as a submit does, so that it shows what would really run.
    conditions = start_conditions(session, checked, arguments["after"], queue)
    # Before anything of them is rendered.
    if not (dry_run or trust):
        require_trust([*checked.sources, *template_sources(templates)])
    prepared = prepare(
        checked,
        session.store,
        session.backends,
        this_site(),
        overrides,
        templates,
        conditions=conditions,
        resumes=point,
    )._replace(labels=labels)
    if dry_run:
        show_dry_run(prepared, as_json, trust)
        return 0
    settle_trust(prepared.sources, trust)
    return submit_and_follow(session, prepared, as_json, follow, wait_for_it)


@click.command(
    cls=LaunchCommand,
    epilog=examples(
        "gptctl render config --style standalone --gpus-per-node 4",
        "gptctl render --cluster a800 --nodes 2 --style sbatch > sbatch_run.sh",
        "gptctl render --gpus-per-node 8 -- -m trainer --model_name_or_path gpt2-en --mp_degree 2",
    ),
)
@config_options
@launch_options
@click.option(
    "--node",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --style static, print the command of this node only.",
)
@as_json_option
@click.pass_obj
def render(
    session: Session, /, node: int | None, as_json: bool, template: str | None, **arguments: Any
) -> None:
    """Print the command line or script that launches a config.

    Styles: standalone, c10d, static, launch (torch.distributed.launch); on a Slurm cluster also
    srun-script, sbatch and loop. The script runs your files in place: gptctl creates neither a job
    nor a run folder.
    """
    from gptctl.cli import ui
    from gptctl.jobs.preflight import check_program
    from gptctl.jobs.submit import this_site
    from gptctl.planning.render import render as rendered
    from gptctl.planning.render import script_of

    checked, overrides = check_job(session, **arguments)
    refuse_invalid(checked)
    refuse_waiting(checked, arguments["after"])
    require_endpoint(checked)
    backend = session.backends.of(checked.cluster.kind)
    plan = backend.plan(checked, this_site(), overrides=overrides)
    # The script runs the user's files in place, so they must be there.
    missing = list(check_program(checked, plan, this_site()))
    refuse_invalid(checked._replace(findings=(*checked.findings, *missing)))
    # Checked here: the number of nodes is known only after planning.
    if node is not None and node >= plan.nodes:
        raise UserError(f"there is no node {node}", f"use 0 to {plan.nodes - 1}", WRONG_USAGE)
    ui.note_machine_findings(checked)
    # Findings go to stderr below: stdout can be saved as a script.
    text = rendered(plan, script_of(plan.style), templates_of(template, checked.path), node)
    if as_json:
        ui.print_json({"style": plan.style, "plan": plan.as_json(), "text": text})
    else:
        ui.print_findings(checked.findings, to_stderr=True)
        ui.print_exactly(text)


def templates_of(template: str | None, config: Path | None) -> list[UserTemplate]:
    """Read the user's templates: the named ones, then the folder `templates` beside the config."""
    from gptctl.planning.user_templates import found_templates, named_templates

    named = named_templates(Path(template)) if template is not None else []
    return [*named, *(found_templates(config.parent / "templates") if config else [])]


def refuse_invalid(checked: Checked) -> None:
    # A script from an invalid config would fail later, on the cluster.
    if not checked.is_valid:
        raise UserError(f"{checked.name} is invalid", findings=checked.findings)


def require_endpoint(checked: Checked) -> None:
    """Refuse to print a command for several machines that nobody told where to meet."""
    from gptctl.planning.build import C10D_PORT, STATIC_PORT, rendezvous_form

    # A submitted job runs its nodes on this machine; a printed command is for other ones.
    if checked.machines.nodes == 1 or not checked.cluster.traits.is_one_machine:
        return
    if checked.launch.rdzv.endpoint:
        return
    port = C10D_PORT if rendezvous_form(checked.launch) == "c10d" else STATIC_PORT
    message = f"{checked.machines.nodes} nodes, but no rendezvous endpoint is set"
    hint = (
        f"add -o Launch.rdzv.endpoint=HOST:{port} with the address of node 0, or in single quotes "
        f"'$MASTER_ADDR:{port}'; or choose a cluster with --cluster"
    )
    raise UserError(message, hint, WRONG_USAGE)


def refuse_waiting(checked: Checked, after: Sequence[str]) -> None:
    # Only a scheduler can hold back a script that is printed.
    if after and not checked.cluster.traits.has_queue:
        message = f"--after {after[0]}: a printed script for {checked.cluster.name} cannot wait"
        raise UserError(message, "use gptctl submit, or omit --after", WRONG_USAGE)


def refuse_contradiction(dry_run: bool, follow: bool, wait_for_it: bool) -> None:
    # Checked first: a contradiction must not cost a query to the scheduler.
    if dry_run and (follow or wait_for_it):
        message = "--dry-run cannot be combined with --follow or --wait"
        raise UserError(message, "omit one of them", WRONG_USAGE)


def resume_point(session: Session, job: str) -> ResumePoint:
    from gptctl.jobs.resume import find_resume_point

    return find_resume_point(session.find(job), session.store, session.backends)


def show_dry_run(prepared: Prepared, as_json: bool, trust: bool) -> None:
    from gptctl.cli import ui

    plan = prepared.plan
    ui.note_machine_findings(prepared.checked, prepared.findings)
    show_doubts(prepared.sources, trust)
    if as_json:
        facts = {"plan": plan.as_json(), "scripts": prepared.scripts}
        ui.print_json({**facts, "continues": prepared.continues, "notes": prepared.notes})
        return
    print_notes(prepared)
    for name, text in prepared.scripts.items():
        # The titles go to stderr: stdout has the scripts only.
        ui.say(f"# {plan.remote_dir}/{name}, cluster {plan.cluster}, nodes: {plan.nnodes}")
        ui.print_exactly(text)


def print_notes(prepared: Prepared) -> None:
    from gptctl.cli import ui

    announce_files(prepared.sources)
    ui.print_findings(prepared.findings, to_stderr=True)
    for note in prepared.notes:
        ui.say(note)


def show_length(chain: Chain) -> None:
    from gptctl.cli import ui

    ui.say(f"# and {chain.length - 1} more, each of which resumes the one before")


def submit_chain(
    chain: Chain, session: Session, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    """Submit a chain, say what was submitted, and follow or wait if asked to."""
    from gptctl.cli import ui
    from gptctl.cli.chain import follow_chain, partial_failure

    print_notes(chain.first)
    try:
        is_complete = chain.submit()
    except (UserError, KeyboardInterrupt) as error:
        # Before the first job exists, it is an error like that of any submit.
        if not chain.records:
            raise
        raise partial_failure(chain, error) from None
    if not is_complete:
        ui.say(f"{chain.so_far()}; cancel them: gptctl cancel {' '.join(chain.ids)}")
        return INTERRUPTED
    announce(chain.first, chain.records[0], as_json, chain=chain.ids)
    if not as_json:
        ui.say(f"chain of {chain.length} jobs, each resumes the one before: {' '.join(chain.ids)}")
    return follow_chain(chain, session, as_json, follow, wait_for_it)


def submit_and_follow(
    session: Session, prepared: Prepared, as_json: bool, follow: bool, wait_for_it: bool
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs import job_status
    from gptctl.jobs.submit import refuse_without_gpus
    from gptctl.jobs.submit import submit as send

    refuse_without_gpus(prepared)
    # Before the job starts: the user can still press Ctrl-C.
    print_notes(prepared)
    sent = send(prepared, session.store, session.backends)
    # Ctrl-C came after the point of no return: the job exists, and the user must know.
    if sent.was_interrupted:
        ui.say(job_status.still_running(sent.record))
        return INTERRUPTED
    if sent.problem:
        ui.say(job_status.start_problem(sent.record, sent.problem))
    return announce_and_follow(session, prepared, sent.record, as_json, follow, wait_for_it)


def announce_and_follow(
    session: Session,
    prepared: Prepared,
    record: JobRecord,
    as_json: bool,
    follow: bool,
    wait_for_it: bool,
) -> int:
    """Print what was submitted, then follow or wait if asked to. Ctrl-C does not stop the job."""
    from gptctl.cli import ui
    from gptctl.cli.follow import follow_job
    from gptctl.cli.jobs import wait_for
    from gptctl.jobs import job_status
    from gptctl.logs.files import FileFilter
    from gptctl.logs.stream import LineFilter

    try:
        # One JSON object, so wait first: it includes the final state.
        if as_json and wait_for_it and not follow:
            code = wait_for(session, record, None, quiet=True)
            announce(prepared, record, as_json, **session.state_of(record).as_json())
            return code
        announce(prepared, record, as_json)
        if follow:
            style = "json" if as_json else "text"
            # All attempts: the job has just started, so this shows it from its beginning.
            return follow_job(session, record, FileFilter(all_attempts=True), LineFilter(), style)
        return wait_for(session, record, None) if wait_for_it else 0
    except KeyboardInterrupt:
        ui.say(job_status.still_running(record))
        return INTERRUPTED


def announce(prepared: Prepared, record: JobRecord, as_json: bool, **more: Any) -> None:
    from gptctl.cli import ui
    from gptctl.engine.run_folder import RunFolder
    from gptctl.jobs import job_status
    from gptctl.text import count

    plan = prepared.plan
    endpoint = RunFolder(record.local_dir).endpoint()
    waiting_for = RunFolder(record.local_dir).waiting_for()
    # `more` has the final state, if the caller has waited for it, or the ids of a chain.
    facts = {**job_status.submitted(record, endpoint), **more}
    if as_json:
        ui.print_json(facts)
        return
    # Before the ranks start, the rendezvous address may not be chosen yet.
    later = (
        f"{plan.master_addr or 'the first allocated host'}:{plan.master_port or '(a free port)'}"
    )
    rendezvous = f"{plan.form} rendezvous{f' {plan.rdzv_id}' if plan.form == 'c10d' else ''}"
    ranks = f"{count(plan.world, 'rank')}: {plan.nnodes} × {plan.per_node}"
    shown = [
        ("state", f"PENDING: {waiting_for}" if waiting_for else ""),
        ("world", f"{ranks} on cluster {plan.cluster}"),
        ("scheduler", f"{plan.kind} job {facts['scheduler_id']}" if facts["scheduler_id"] else ""),
        ("endpoint", f"{endpoint or later}, {rendezvous}"),
        ("logs", record.log_dir),
        ("follow", facts["follow"]),
    ]
    # Only jobs with a scheduler have an id there: drop empty rows.
    ui.print_pairs(f"job {record.id}", [(name, text) for name, text in shown if text])
