"""The verb `logs`: which job, which files, which lines; everything else is in `gptctl/logs`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import examples, job_argument
from gptctl.cli.session import Session, require_folder
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord
    from gptctl.logs.files import LogFiles, Wanted
    from gptctl.logs.stream import Lines

ANSWERS = ("failed", "list_them", "metrics")  # options whose answer is a report, not lines


@click.command(
    epilog=examples("gptctl logs --follow", "gptctl logs gpt-3f9a2c --rank 0,3,8-11 --tail 20")
)
@job_argument(required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until the job ends; the exit code is its verdict."
)
@click.option("--rank", metavar="0,3,8-11", help="Only these ranks.")
@click.option("--node", type=click.IntRange(min=0), help="Only this node and its ranks.")
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt instead of the latest.")
@click.option("--all-attempts", is_flag=True, help="Every attempt.")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of every file."
)
@click.option(
    "--since", metavar="T", help="Only lines since then: 90s, 5m, 2h, 07:30, 2026-11-16T07:30."
)
@click.option(
    "--grep", "pattern", metavar="RE", help="Only lines with a match of this regular expression."
)
@click.option(
    "--errors", is_flag=True, help="Only lines that look like errors, with their tracebacks."
)
@click.option(
    "--failed", is_flag=True, help="Who failed first, how, and its last lines; then who followed."
)
@click.option(
    "--list", "list_them", is_flag=True, help="The files, with what became of their ranks."
)
@click.option("--metrics", is_flag=True, help="A table of step, loss, rates and learning rate.")
@click.option(
    "--raw", is_flag=True, help="The bytes of the files, with neither prefix nor cleaning."
)
@click.option(
    "--json", "as_json", is_flag=True, help="One object a line, or a report for programs."
)
@click.pass_obj
def logs(session: Session, /, job: str | None, **asked: Any) -> int:
    """Show the logs of all ranks in one stream.

    Those of the nodes and the scheduler, too. Without JOB: the latest job.

    A log file can stand in the place of JOB. Following works for a job that has not started yet, and picks up ranks and
    attempts as they come; leaving it with Ctrl-C leaves the job alone.
    """
    check_options(asked)
    if job is not None and os.path.isfile(job):
        return show_file(job, asked)
    record = session.find(job)
    files = files_of(record)
    if asked["follow"]:
        return follow_job(
            session, record, wanted_of(asked, record.per_node), lines_of(asked), style_of(asked)
        )
    require_folder(record)
    session.catch_up(record)
    if asked["failed"]:
        return show_failure(session, record, files, asked)
    return answer(
        files, wanted_of(asked, record.per_node), asked, is_over=lambda: session.is_over(record)
    )


def check_options(asked: dict[str, Any]) -> None:
    """Options that contradict each other are named, not silently ignored."""
    reports = [f"--{name.removesuffix('_them')}" for name in ANSWERS if asked[name]]
    clashes = [
        (len(reports) > 1, " and ".join(reports)),
        (bool(reports and asked["follow"]), f"{''.join(reports[:1])} and --follow"),
        (bool(asked["raw"] and asked["as_json"]), "--raw and --json"),
        (asked["all_attempts"] and asked["attempt"] is not None, "--attempt and --all-attempts"),
        (bool(asked["rank"] and asked["node"] is not None), "--rank and --node"),
    ]
    for clash, names in clashes:
        if clash:
            raise UserError(f"{names} do not go together", "leave one of them out", WRONG_USAGE)


def files_of(record: JobRecord) -> LogFiles:
    from gptctl.logs.local import LocalLogFiles

    return LocalLogFiles(Path(record.log_dir), record.run_folder)


def wanted_of(asked: dict[str, Any], per_node: int | None) -> Wanted:
    from gptctl.logs.files import Wanted, parse_ranks

    ranks = parse_ranks(asked["rank"]) if asked["rank"] is not None else None
    return Wanted(ranks, asked["node"], per_node, asked["attempt"], asked["all_attempts"])


def lines_of(asked: dict[str, Any]) -> Lines:
    from gptctl.logs.lines import parse_since
    from gptctl.logs.match import Grep
    from gptctl.logs.stream import Lines

    return Lines(
        tail=asked["tail"],
        since=parse_since(asked["since"]) if asked["since"] is not None else None,
        grep=Grep(asked["pattern"]) if asked["pattern"] is not None else None,
        errors=asked["errors"],
        raw=asked["raw"],
    )


def style_of(asked: dict[str, Any]) -> Any:
    return "raw" if asked["raw"] else "json" if asked["as_json"] else "text"


def show_file(path: str, asked: dict[str, Any]) -> int:
    from gptctl.logs.local import LocalFile

    if asked["failed"] or asked["follow"]:
        raise UserError(
            f"{path} is a file, not a job", "--follow and --failed need a job", WRONG_USAGE
        )
    return answer(LocalFile(Path(path)), wanted_of(asked, None), asked, is_over=lambda: True)


def answer(
    files: LogFiles, wanted: Wanted, asked: dict[str, Any], is_over: Callable[[], bool]
) -> int:
    from gptctl.logs import tables as report
    from gptctl.logs.show import show_logs

    if asked["list_them"]:
        report.print_list(files, wanted, asked["as_json"], is_over())
    elif asked["metrics"]:
        report.print_metrics(files, wanted, asked["as_json"])
    else:
        show_logs(files, wanted, lines_of(asked), style_of(asked))
    return 0


def show_failure(
    session: Session, record: JobRecord, files: LogFiles, asked: dict[str, Any]
) -> int:
    """First what is known of the job as a whole: a time limit or a cancel is not the fault of the first rank to end."""
    from gptctl.cli import ui
    from gptctl.logs import tables as report

    state = session.state_of(record)
    if not asked["as_json"]:
        ui.print_text(f"{record.id}: {state}")
    report.print_failure(files, asked["attempt"], asked["as_json"], **state._asdict())
    return 0


class Watched:
    """A job that is waited for: says how it stands while it is not running, and when that changes."""

    def __init__(self, session: Session, record: JobRecord, say: Callable[[str], None]) -> None:
        self._session = session
        self._record, self._say, self._said = record, say, ""

    def is_over(self) -> bool:
        from gptctl.engine.run_folder import RUNNING
        from gptctl.jobs.state import is_final

        state = self._session.state_of(self._record)
        if is_final(state):
            return True
        words = str(state).partition(", expected")[0]  # which is another moment in every answer
        if words != self._said and (self._said or state.state != RUNNING):
            self._said = words
            self._say(f"{self._record.id}: {state}")
        return False


def follow_job(
    session: Session, record: JobRecord, wanted: Wanted, lines: Lines, style: Any = "text"
) -> int:
    """Until the job ends; its verdict. On a terminal the training's progress stands below the lines."""
    from gptctl.cli import ui
    from gptctl.engine.run_folder import FAILED
    from gptctl.jobs import report
    from gptctl.jobs.state import exit_code
    from gptctl.logs.progress import ProgressLine
    from gptctl.logs.show import Printer
    from gptctl.logs.stream import follow

    sys.stdout.flush()
    out = sys.stdout.buffer
    printer: Any = Printer(out, style)
    if style == "text" and out.isatty() and os.environ.get("TERM") != "dumb":
        printer = ProgressLine(printer, out, report.max_steps(record))
    watched = Watched(session, record, printer.say)
    try:
        with session.backend_of(record).following(record):
            follow(files_of(record), wanted, lines, printer, watched.is_over)
    except KeyboardInterrupt:
        ui.say(report.still_running(record))
        return INTERRUPTED
    finally:
        if isinstance(printer, ProgressLine):
            printer.close()
    session.catch_up(record)
    state = session.state_of(record)
    ui.say(f"{record.id}: {state}")
    if state.state == FAILED:
        ui.say(f"hint: gptctl logs {record.id} --failed")
    return exit_code(state)
