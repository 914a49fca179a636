"""The verb `logs`: which job, which files, which lines; `follow.py` follows a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import examples, job_argument
from gptctl.cli.session import Session, files_of, require_folder
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
    "-f", "--follow", is_flag=True, help="Follow until the job ends; exit with the job's status."
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

    Those of nodes and the scheduler are included. Without JOB: the latest job. A log file can be given instead of JOB. --follow also works before a job has started, and
    includes ranks and attempts as they start; Ctrl-C stops following, not the job. On a terminal,
    --follow shortens long records and shows the progress; --raw shows every line.
    """
    check_options(asked)
    if job is not None and os.path.isfile(job):
        return show_file(job, asked)
    from gptctl.cli.follow import follow_job

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
    from gptctl.logs.local_files import LocalFile

    if asked["failed"] or asked["follow"]:
        raise UserError(
            f"{path} is a file, not a job", "--follow and --failed need a job", WRONG_USAGE
        )
    return answer(LocalFile(Path(path)), wanted_of(asked, None), asked, is_over=lambda: True)


def answer(
    files: LogFiles, wanted: Wanted, asked: dict[str, Any], is_over: Callable[[], bool]
) -> int:
    from gptctl.cli import ui
    from gptctl.logs.show import show_logs

    if asked["list_them"]:
        print_list(files, wanted, asked["as_json"], is_over())
    elif asked["metrics"]:
        print_metrics(files, wanted, asked["as_json"])
    else:
        show_logs(files, wanted, lines_of(asked), style_of(asked), say=ui.say)
    return 0


def print_list(
    files: LogFiles, wanted: Wanted, as_json: bool = False, job_is_over: bool = False
) -> None:
    from gptctl.cli import ui
    from gptctl.logs.tables import LIST_COLUMNS, list_cells, list_rows
    from gptctl.text import count

    rows = list_rows(files, wanted, job_is_over)
    if as_json:
        ui.print_json(rows)
    else:
        ui.print_table(count(len(rows), "log file"), LIST_COLUMNS, list_cells(rows), by_first=True)


def print_metrics(files: LogFiles, wanted: Wanted, as_json: bool = False) -> None:
    from gptctl.cli import ui
    from gptctl.logs.tables import metric_rows, metric_table
    from gptctl.text import count

    rows = metric_rows(files, wanted)
    if as_json:
        ui.print_json(rows)
    else:
        ui.print_table(count(len(rows), "step"), *metric_table(rows))


def print_failure(
    files: LogFiles, attempt: int | None = None, as_json: bool = False, **of_job: str
) -> bool:
    """Returns whether anything has failed."""
    from gptctl.cli import ui
    from gptctl.logs.tables import failure_report

    report = failure_report(files, attempt, of_job.get("state", ""))
    if as_json:
        ui.print_json({**of_job, **report.as_json()})
    else:
        ui.print_text("\n".join(report.lines()))
    return report.failure.is_failure


def show_failure(
    session: Session, record: JobRecord, files: LogFiles, asked: dict[str, Any]
) -> int:
    """The job's state comes first: a rank that exits first is not to blame for a time limit."""
    from gptctl.cli import ui

    state = session.state_of(record)
    if not asked["as_json"]:
        ui.print_text(f"{record.id}: {state}")
    print_failure(files, asked["attempt"], asked["as_json"], **state._asdict())
    return 0
