"""The verbs for submitted jobs: inspect, stop, wait for and fetch them.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import (
    NumberRange,
    as_json_option,
    byte_size,
    complete_job,
    examples,
    job_argument,
)
from gptctl.cli.session import Session, require_folder
from gptctl.cli.table_layout import Column
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.backends import JobState
    from gptctl.jobs.store import JobRecord

MAX_STOPPED = 8  # jobs that `cancel` stops at the same time: each asks its own hosts in parallel


@click.command(epilog=examples("gptctl status", "gptctl status gpt-3f9a2c --json"))
@job_argument(required=False)
@as_json_option
@click.pass_obj
def status(session: Session, job: str | None, as_json: bool) -> None:
    """Show the state of a job.

    Without JOB: the latest job of this folder, or else your latest.
    """
    from gptctl.cli import ui
    from gptctl.jobs import job_status

    record = session.find(job, announce=as_json or not title_is_seen())
    # Copy new files first: the state of the ranks is read from them.
    session.catch_up(record)
    facts = job_status.status(record, session.backends)
    if as_json:
        ui.print_json(facts)
    else:
        ui.print_pairs(f"job {record.id}", job_status.pairs(facts))


@click.command(
    epilog=examples(
        "gptctl show gpt-3f9a2c",
        "gptctl show gpt-3f9a2c Launch.env",
        "gptctl show gpt-3f9a2c --script",
    )
)
@job_argument(required=False)
@click.argument("prefix", required=False)
@click.option("--script", "show_script", is_flag=True, help="Print the scripts that run it.")
@as_json_option
@click.pass_obj
def show(
    session: Session, job: str | None, prefix: str | None, show_script: bool, as_json: bool
) -> None:
    """Show what a job was started with, and where each value came from.

    Without JOB: the latest job of this folder, or else your latest. PREFIX selects config keys and
    environment variables by their start: Launch, Optimizer.lr.
    """
    from gptctl.cli import ui
    from gptctl.engine.file_reading import read_json
    from gptctl.jobs import job_status
    from gptctl.jobs.resume import whole_lineage
    from gptctl.jobs.state import is_removed
    from gptctl.text import plain_value

    # `show Launch.env`: the first word of a key is a section, and no job id is one.
    if job and not prefix and job.partition(".")[0] in section_names():
        job, prefix = None, job
    has_title = prefix is None and not show_script and not as_json
    record = session.find(job, announce=not has_title or not title_is_seen())
    if show_script:
        require_folder(record)
        print_scripts(session, record, as_json)
        return
    facts = {
        **job_status.status(record, session.backends),
        **job_status.lineage_facts(whole_lineage(record, session.store)),
    }
    # The config is in the run folder; without it, show what is known of the job.
    if not record.run_folder.is_dir() and (prefix or not is_removed(record)):
        require_folder(record)
    values = job_status.origins(record, prefix or "")
    if prefix is not None and not values:
        message = f"no key of {record.id} starts with {prefix}"
        raise UserError(message, "`gptctl keys` lists them", WRONG_USAGE)
    if as_json:
        plan, git = (read_json(record.run_folder / name) for name in ("plan.json", "git.json"))
        config = [{"key": key, "value": value, "origin": origin} for key, value, origin in values]
        ui.print_json({**facts, "plan": plan, "git": git, "values": config})
        return
    if prefix is None:
        ui.print_pairs(f"job {record.id}", job_status.pairs(facts))
        # Most values are defaults. Show what was chosen; a PREFIX shows the defaults, too.
        values = [row for row in values if row[2] not in ("default", "")]
    cells = [[key, plain_value(value), origin] for key, value, origin in values]
    if cells:
        ui.print_table("values", ["key", Column("value", "wrap"), "from"], cells)


def title_is_seen() -> bool:
    """Whether the title of the answer names the job: in `gptctl status | grep x` it is lost."""
    return sys.stdout.isatty() or not sys.stderr.isatty()


def section_names() -> set[str]:
    from gptctl.spec.launch import Launch
    from trainer.config.read import paths_of
    from trainer.config.sections import RunConfig

    paths = [*paths_of(RunConfig), *paths_of(Launch, "Launch")]
    return {path.partition(".")[0] for path in paths}


def print_scripts(session: Session, record: JobRecord, as_json: bool) -> None:
    from gptctl.cli import ui
    from gptctl.jobs import job_status

    backend = session.backend_of(record)
    texts = job_status.scripts(record, backend)
    if as_json:
        ui.print_json({"job": record.id, "scripts": dict(zip(backend.scripts, texts))})
    else:
        # Byte for byte: the output can be saved and run.
        ui.print_exactly("\n".join(texts))


@click.command(epilog=examples("gptctl cancel gpt-3f9a2c", "gptctl cancel gpt-3f9a2c --now"))
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--now", is_flag=True, help="Kill the ranks at once; save no checkpoint.")
@as_json_option
@click.pass_obj
def cancel(session: Session, jobs: tuple[str, ...], now: bool, as_json: bool) -> int:
    """Stop jobs; the trainer saves a checkpoint first.

    The trainer has 30 seconds to save. The command returns when all processes of the jobs have
    exited. It names hosts that do not answer, where the job may still run, and exits with code 3.
    """
    # Find all jobs before stopping one: after a typing error nothing is stopped.
    return cancel_records(session, [session.find(job) for job in jobs], now, as_json)


def cancel_records(session: Session, records: Sequence[JobRecord], now: bool, as_json: bool) -> int:
    from gptctl.cli import ui
    from gptctl.engine.atomic_files import private_files
    from gptctl.jobs.state import may_run
    from gptctl.remote.parallel import in_parallel

    records = list({record.id: record for record in records}.values())  # each once
    asked, ended = set[str](), set[str]()

    def stop(record: JobRecord) -> UserError | None:
        problem = stop_running(record)
        ended.add(record.id)
        return problem

    def stop_running(record: JobRecord) -> UserError | None:
        if not may_run(record, session.backends):
            return None
        # Stopping can take half a minute: say what the command waits for.
        ui.say(f"stopping {record.id} …")
        asked.add(record.id)
        try:
            session.backend_of(record).cancel(record, now)
        except UserError as error:  # stop the other jobs anyway
            return error
        return None

    # All at once: one on hosts that do not answer must not delay the others. The umask belongs to
    # the process, not to a thread.
    try:
        with private_files():
            results = in_parallel(stop, records, MAX_STOPPED)
    except KeyboardInterrupt:  # it ends the waiting; a job that was asked stops anyway
        left = [record.id for record in records if record.id not in ended]
        # An empty line first: the terminal has written ^C.
        ui.say("\n".join(["", *(_interrupted_cancel(job, job in asked) for job in left)]))
        return INTERRUPTED
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, UserError):
            raise result
    problems = [result for result in results if isinstance(result, UserError)]
    stopped = asked - {each.id for each, result in zip(records, results) if result}
    answers = [
        {"job": each.id, "state": _state_after_cancel(session, each, each.id in stopped)}
        for each in records
    ]
    if as_json:
        ui.print_json(answers)
    else:
        for answer in answers:
            ui.print_state(answer["job"], answer["state"])
    for problem in problems:
        ui.print_error(problem)
    # The most serious problem decides, as if the jobs had been stopped one by one.
    return max((problem.exit_code for problem in problems), default=0)


def _state_after_cancel(session: Session, record: JobRecord, was_stopped: bool) -> str:
    from gptctl.engine.job_result import CANCELLED

    # A job that was being submitted: the gptctl that did so has removed it.
    if was_stopped and not record.handle and not record.run_folder.is_dir():
        return CANCELLED
    return session.state_of(record).state


def _interrupted_cancel(job: str, was_asked: bool) -> str:
    if was_asked:
        return f"{job} was asked to stop. Check it: gptctl status {job}"
    return f"{job} was not asked to stop yet. Stop it: gptctl cancel {job}"


@click.command(epilog=examples("gptctl wait", "gptctl wait gpt-3f9a2c --timeout 600 && echo done"))
@job_argument(required=False)
@click.option(
    "--timeout",
    type=NumberRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time.",
)
@as_json_option
@click.pass_obj
def wait(session: Session, job: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until a job ends; exit with its status.

    Without JOB: the latest job of this folder, or else your latest. Exit code 0: the job
    completed; 1: it did not, or not in time.
    """
    from gptctl.cli import ui
    from gptctl.jobs import job_status

    record = session.find(job)
    try:
        code = wait_for(session, record, timeout, quiet=as_json)
    # Ctrl-C ends the waiting, not the job: tell the user so.
    except KeyboardInterrupt:
        ui.say(job_status.still_running(record))
        return INTERRUPTED
    if as_json:
        ui.print_json(job_status.row(record, session.backends))
    return code


def wait_for(
    session: Session, record: JobRecord, timeout: float | None, quiet: bool = False
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs.notify_watcher import has_open_news, notifying
    from gptctl.jobs.state import exit_code, is_final

    state = session.state_of(record)
    # A job that has ended needs no connection to its hosts, unless its engine has no way out.
    if not is_final(state) or has_open_news(record):
        with (
            session.backend_of(record).following(record),
            notifying(record, lambda: state, ui.say),
        ):
            state = _wait_until_final(session, record, timeout)
    if not quiet:
        ui.print_state(record.id, str(state))
    return exit_code(state)


def _wait_until_final(session: Session, record: JobRecord, timeout: float | None) -> JobState:
    from gptctl.cli import ui
    from gptctl.engine.job_result import PENDING, UNKNOWN
    from gptctl.jobs.state import is_final

    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = ""
    while not is_final(state := session.state_of(record)):
        is_unknown = state.state == UNKNOWN
        # The reason changes often while a job is pending: report a new state only.
        if state.state != shown:
            shown = state.state
            ui.say(f"{record.id}: {state if shown in (PENDING, UNKNOWN) else shown}")
        # Retry while the cluster may answer later; otherwise waiting would never end.
        if is_unknown and not session.backend_of(record).may_answer_later(record):
            raise UserError(f"{record.id}: {state.reason}", "", OUT_OF_REACH)
        if deadline and time.monotonic() > deadline:
            message = f"{record.id} is still {state.state}"
            raise UserError(
                message, f"wait longer, or stop it: gptctl cancel {record.id}", ANSWER_IS_NO
            )
        # Short for local jobs. Backends limit how often they really query a scheduler.
        time.sleep(0.2)
    return state


@click.command(
    epilog=examples(
        "gptctl fetch gpt-3f9a2c", "gptctl fetch gpt-3f9a2c --to results --no-checkpoints"
    )
)
@job_argument(required=False)
@click.option("--to", "target", metavar="DIR", help="Copy to this folder instead of the job's own.")
@click.option(
    "--checkpoints/--no-checkpoints", default=True, help="Also copy checkpoints (default)."
)
@click.option(
    "--max-size", type=byte_size, metavar="SIZE", help="Copy at most this much (default: 1TB)."
)
@click.option(
    "--max-files",
    type=click.IntRange(min=1),
    metavar="N",
    help="Copy at most N files from each host (default: 100000).",
)
@as_json_option
@click.pass_obj
def fetch(session: Session, /, job: str | None, as_json: bool, **options: Any) -> int:
    """Copy the files that a job wrote on other machines to this one.

    These are logs, metrics and checkpoints, or what a script wrote to its folder. Files that are
    already here are not copied again; an interrupted copy resumes where it stopped. Without JOB:
    the latest job of this folder, or else your latest.
    """
    from gptctl.cli import ui
    from gptctl.remote.limits import MAX_FETCHED, MAX_FILES
    from gptctl.reporting import FetchOptions
    from gptctl.text import count

    record = session.find(job)
    require_folder(record)
    # The backend reports through `ui.progress`: only `ui` may print.
    wanted = FetchOptions(
        options["target"],
        options["checkpoints"],
        MAX_FETCHED if options["max_size"] is None else options["max_size"],
        options["max_files"] or MAX_FILES,
    )
    fetched = session.backend_of(record).fetch(record, wanted, ui.progress)
    if as_json:
        ui.print_json(fetched._asdict())
    else:
        new = f"{fetched.new_files:,} new" if fetched.new_files else "nothing new"
        what = f"{count(fetched.files, 'file')}, {fetched.bytes:,} bytes"
        ui.print_text(f"{what}: {fetched.folder}; {new}")
    return OUT_OF_REACH if fetched.not_copied else 0
