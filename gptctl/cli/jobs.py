"""The verbs that look after jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import as_json_option, complete_job, examples, job_argument
from gptctl.cli.session import Session, require_folder
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.backends import JobState
    from gptctl.jobs.store import JobRecord

RECENT = 20  # jobs that `list` shows


@click.command("list", epilog=examples("gptctl list", "gptctl list --all --json"))
@click.option("--all", "show_all", is_flag=True, help=f"Show all jobs, not only the last {RECENT}.")
@as_json_option
@click.pass_obj
def list_verb(session: Session, show_all: bool, as_json: bool) -> None:
    """List jobs and their states.

    The newest job comes last.
    """
    from gptctl.cli import ui
    from gptctl.jobs import report
    from gptctl.text import count

    records = session.store.records(None if show_all else RECENT)
    rows = report.rows(records, session.backends)
    session.report_damage()
    if as_json:
        ui.print_json(rows)
        return
    for row in rows:
        row["ranks"] = f"{row['nodes']} × {row['world_size'] // row['nodes']}"
        row["when"] = report.when(row["created"])
    fields = ("job", "state", "ranks", "cluster", "when", "reason")
    cells = [[row[key] for key in fields] for row in rows]
    hidden = len(session.store.ids()) - len(rows)
    older = f"; {count(hidden, 'older one')} with --all" if hidden else ""
    columns = ["job", "state", "ranks", "cluster", "created", "reason"]
    ui.print_table(f"{count(len(rows), 'job')}{older}", columns, cells)


@click.command(epilog=examples("gptctl status", "gptctl status gpt-3f9a2c --json"))
@job_argument(required=False)
@as_json_option
@click.pass_obj
def status(session: Session, job: str | None, as_json: bool) -> None:
    """Show the state of a job.

    Without JOB: the latest job.
    """
    from gptctl.cli import ui
    from gptctl.jobs import report

    record = session.find(job)
    session.catch_up(record)
    facts = report.status(record, session.backends)
    if as_json:
        ui.print_json(facts)
    else:
        ui.print_pairs(f"job {record.id}", report.pairs(facts))


@click.command(
    epilog=examples(
        "gptctl show gpt-3f9a2c",
        "gptctl show gpt-3f9a2c Launch.env",
        "gptctl show gpt-3f9a2c --script",
    )
)
@job_argument(required=True)
@click.argument("prefix", required=False)
@click.option("--script", "show_script", is_flag=True, help="Print its scripts.")
@as_json_option
@click.pass_obj
def show(session: Session, job: str, prefix: str | None, show_script: bool, as_json: bool) -> None:
    """Show what a job was started with, and where each value came from.

    PREFIX selects config keys, such as Launch or Optimizer.lr, and environment variables.
    """
    from gptctl.cli import ui
    from gptctl.engine.run_folder import read_json
    from gptctl.jobs import report

    record = session.find(job)
    require_folder(record)
    if show_script:
        ui.print_exactly("\n".join(report.scripts(record)))
        return
    values = report.origins(record, prefix or "")
    if prefix is not None and not values:
        message = f"no key of {record.id} starts with {prefix}"
        raise UserError(message, "`gptctl keys` lists them", WRONG_USAGE)
    if as_json:
        plan, git = (read_json(record.run_folder / name) for name in ("plan.json", "git.json"))
        config = [{"key": key, "value": value, "origin": origin} for key, value, origin in values]
        facts = report.status(record, session.backends)
        ui.print_json({**facts, "plan": plan, "git": git, "values": config})
        return
    if prefix is None:
        facts = report.status(record, session.backends)
        ui.print_pairs(f"job {record.id}", report.pairs(facts))
        values = [row for row in values if row[2] not in ("default", "")]
    cells = [[key, "" if value is None else value, origin] for key, value, origin in values]
    ui.print_table("values", ["key", "value", "from"], cells)


@click.command(epilog=examples("gptctl cancel gpt-3f9a2c", "gptctl cancel gpt-3f9a2c --now"))
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--now", is_flag=True, help="Kill it without letting it save.")
@as_json_option
@click.pass_obj
def cancel(session: Session, jobs: tuple[str, ...], now: bool, as_json: bool) -> int:
    """Stop jobs; the trainer saves a checkpoint first.

    It has 30 seconds for that. gptctl returns when no process of the jobs is left.
    """
    from gptctl.cli import ui
    from gptctl.jobs.state import may_run

    records = [session.find(job) for job in jobs]
    answers = []
    problems: list[UserError] = []
    for record in records:
        if may_run(record, session.backends):
            ui.say(f"stopping {record.id} …")
            try:
                session.backend_of(record).cancel(record, now)
            except UserError as error:  # the others are stopped all the same
                problems.append(error)
        answers.append({"job": record.id, "state": session.state_of(record).state})
    if as_json:
        ui.print_json(answers)
    else:
        ui.print_text("\n".join(f"{answer['job']}: {answer['state']}" for answer in answers))
    for problem in problems:
        ui.print_error(problem)
    return max((problem.exit_code for problem in problems), default=0)


@click.command(epilog=examples("gptctl wait", "gptctl wait gpt-3f9a2c --timeout 600 && echo done"))
@job_argument(required=False)
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Give up after this time."
)
@as_json_option
@click.pass_obj
def wait(session: Session, job: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until a job ends; exit with its status.

    Without JOB: the latest job. Exit code 0: completed; 1: it ended otherwise, or not in time.
    """
    from gptctl.cli import ui
    from gptctl.jobs import report

    record = session.find(job)
    try:
        code = wait_for(session, record, timeout, quiet=as_json)
    except KeyboardInterrupt:
        ui.say(report.still_running(record))
        return INTERRUPTED
    if as_json:
        ui.print_json(report.row(record, session.backends))
    return code


def wait_for(
    session: Session, record: JobRecord, timeout: float | None, quiet: bool = False
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs.state import exit_code, is_final

    state = session.state_of(record)
    if not is_final(state):
        with session.backend_of(record).following(record):
            state = _wait_until_final(session, record, timeout)
    if not quiet:
        ui.print_text(f"{record.id}: {state}")
    return exit_code(state)


def _wait_until_final(session: Session, record: JobRecord, timeout: float | None) -> JobState:
    from gptctl.cli import ui
    from gptctl.engine.run_folder import UNKNOWN
    from gptctl.jobs.state import is_final

    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = ""
    while not is_final(state := session.state_of(record)):
        is_unknown = state.state == UNKNOWN
        if state.state != shown:
            shown = state.state
            ui.say(f"{record.id}: {state if is_unknown else shown}")
        if is_unknown and not session.backend_of(record).may_answer_later(record):
            raise UserError(f"{record.id}: {state.reason}", "", OUT_OF_REACH)
        if deadline and time.monotonic() > deadline:
            message = f"{record.id} is still {state.state}"
            raise UserError(message, "wait longer, or cancel it", ANSWER_IS_NO)
        time.sleep(0.2)
    return state


@click.command(
    epilog=examples(
        "gptctl fetch gpt-3f9a2c", "gptctl fetch gpt-3f9a2c --to results --no-checkpoints"
    )
)
@job_argument(required=False)
@click.option(
    "--to", "target", metavar="DIR", help="Copy to this folder; default: the job's own folder."
)
@click.option(
    "--checkpoints/--no-checkpoints", default=True, help="Copy checkpoints too (default)."
)
@as_json_option
@click.pass_obj
def fetch(
    session: Session, job: str | None, target: str | None, checkpoints: bool, as_json: bool
) -> int:
    """Copy what a job wrote on its ssh hosts to this machine.

    That is logs, metrics and checkpoints, or what a script left in its folder. Files that are here
    already are not copied again, and an interrupted copy continues where it stopped.
    """
    from gptctl.cli import ui

    record = session.find(job)
    fetched = session.backend_of(record).fetch(record, target, checkpoints, ui.progress)
    if as_json:
        ui.print_json(fetched._asdict())
    else:
        ui.print_text(f"{fetched.files} files, {fetched.bytes:,} bytes: {fetched.folder}")
    return 0
