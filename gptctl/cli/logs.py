"""The verb `logs`: choose the job, its files and the lines to print. `follow.py` follows a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import byte_size, examples, job_argument
from gptctl.cli.session import Session, files_of, require_folder
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.engine.cause import Cause
    from gptctl.jobs.store import JobRecord
    from gptctl.logs.files import FileFilter, LogFiles
    from gptctl.logs.metric_rows import Row
    from gptctl.logs.stream import LineFilter

# Options that choose log lines.
LINE_OPTIONS = {"errors": "--errors", "pattern": "--grep", "since": "--since", "raw": "--raw"}
# Options that print a report instead of log lines. At most one makes sense at a time.
LIST_IMPORTANCE = {"last write": 1, "size": 2, "host": 3, "node": 4, "rank": 5}
METRIC_IMPORTANCE = {"valid_loss": 1, "test_loss": 2, "ips_total": 3, "lr": 4, "speed": 5, "ips": 6}
REPORT_OPTIONS = ("failed", "list_them", "metrics")


@click.command(
    epilog=examples(
        "gptctl logs --follow",
        "gptctl logs gpt-3f9a2c --rank 0,3,8-11 --tail 20",
        "gptctl logs gpt-3f9a2c --failed",
    )
)
@job_argument(required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Follow until the job ends; exit with the job's status."
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show the last N lines of each file, or N steps.",
)
@click.option("--rank", metavar="0,3,8-11", help="Show these ranks only.")
@click.option(
    "--failed", is_flag=True, help="Show which rank failed first, why, and which ranks followed."
)
@click.option("--errors", is_flag=True, help="Show only errors and their tracebacks.")
@click.option(
    "--grep", "pattern", metavar="RE", help="Show lines that match this regular expression."
)
@click.option(
    "--since", metavar="T", help="Show lines since then: 90s, 5m, 2h, 07:30 or 2026-11-16T07:30."
)
@click.option(
    "--metrics", is_flag=True, help="Print a table of steps, losses and speeds of the whole run."
)
@click.option(
    "--node", type=click.IntRange(min=0), metavar="N", help="Show this node and its ranks only."
)
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="N", help="Show this attempt, not the latest."
)
@click.option("--all-attempts", is_flag=True, help="Show every attempt.")
@click.option("--list", "list_them", is_flag=True, help="List the log files and their ranks.")
@click.option(
    "--max-size",
    type=byte_size,
    metavar="SIZE",
    help="Copy at most this much of the logs of each remote node (default: 10GB).",
)
@click.option("--raw", is_flag=True, help="Print the files as they are, without prefixes.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one object per line, or one report."
)
@click.pass_obj
def logs(session: Session, /, job: str | None, **options: Any) -> int:
    """Show the logs of all ranks in one stream.

    Without JOB: the latest job of this folder, or else your latest. JOB can also be the path of a
    log file. The logs of nodes and of the scheduler are included. --follow works before the job
    starts, and adds ranks and attempts as they start; Ctrl-C stops following, not the job. On
    a terminal the config dump is hidden, and --follow also shortens other long records and shows
    the progress. --raw shows every line.
    """
    # Check options first: a clash is reported even if the job cannot be found.
    check_options(options)
    if job is not None and os.path.isfile(job):
        return show_file(job, options)
    # No job id contains a slash, or is named like a log: this is the path of a file.
    if job is not None and ("/" in job or job.endswith(".log") or job.startswith("workerlog.")):
        raise no_such_file(job)
    # Imported late: `--help` and wrong usage must not pay for it.
    from gptctl.cli.follow import follow_job
    from gptctl.jobs.state import is_removed

    record = session.find(job)
    files = files_of(record)
    session.backend_of(record).want_logs(record, options["max_size"])
    # Following starts before the folder check: a pending job has no folder yet.
    if options["follow"] and not is_removed(record):
        return follow_job(
            session,
            record,
            wanted_of(options, record.per_node),
            lines_of(options),
            style_of(options),
        )
    require_folder(record)
    # Copy new lines of remote hosts first; everything below reads local files.
    session.catch_up(record)
    if options["failed"]:
        return show_failure(session, record, files, options)
    if options["metrics"]:
        rows = rows_of(session, record, options)
        return print_metrics(rows, options["tail"], options["as_json"], record.id)
    code = print_logs_or_report(
        record.id,
        files,
        wanted_of(options, record.per_node),
        options,
        is_over=lambda: session.is_over(record),
    )
    say_result(record)
    return code


def say_result(record: JobRecord) -> None:
    """Close the logs of a failed job with the reason: torchrun's last lines may name another."""
    from gptctl.backends import recorded_state
    from gptctl.cli import ui
    from gptctl.engine.job_result import FAILED
    from gptctl.engine.run_folder import RunFolder

    # Only what is recorded here: the state of a running job would cost a query.
    result = RunFolder(record.local_dir).result()
    if result and result.state == FAILED:
        ui.say(f"{record.id}: {recorded_state(result)}")


def check_options(options: dict[str, Any]) -> None:
    """Reject options that contradict each other, instead of ignoring one of them."""
    # `list` is a Python builtin, so the parameter is called `list_them`.
    reports = [f"--{name.removesuffix('_them')}" for name in REPORT_OPTIONS if options[name]]
    clashes = [
        (len(reports) > 1, " and ".join(reports)),
        (bool(reports and options["follow"]), f"{''.join(reports[:1])} and --follow"),
        (bool(options["raw"] and options["as_json"]), "--raw and --json"),
        (
            options["all_attempts"] and options["attempt"] is not None,
            "--attempt and --all-attempts",
        ),
        (bool(options["rank"] and options["node"] is not None), "--rank and --node"),
        *(
            (
                bool(options["metrics"] and options[name] not in (None, False)),
                f"--metrics and {flag}",
            )
            for name, flag in LINE_OPTIONS.items()
        ),
    ]
    for clash, names in clashes:
        if clash:
            raise UserError(f"{names} cannot be combined", "omit one of them", WRONG_USAGE)


def wanted_of(options: dict[str, Any], per_node: int | None) -> FileFilter:
    from gptctl.logs.files import FileFilter, parse_ranks

    # `is not None`: an empty --rank (an unset shell variable) must be an error, not all ranks.
    ranks = parse_ranks(options["rank"]) if options["rank"] is not None else None
    return FileFilter(ranks, options["node"], per_node, options["attempt"], options["all_attempts"])


def lines_of(options: dict[str, Any]) -> LineFilter:
    from gptctl.logs.lines import parse_since
    from gptctl.logs.match import Grep
    from gptctl.logs.stream import LineFilter

    # An empty --since or --grep is parsed too, for the same reason as --rank.
    return LineFilter(
        tail=options["tail"],
        since=parse_since(options["since"]) if options["since"] is not None else None,
        grep=Grep(options["pattern"]) if options["pattern"] is not None else None,
        errors=options["errors"],
        raw=options["raw"],
    )


def style_of(options: dict[str, Any]) -> Any:
    return "raw" if options["raw"] else "json" if options["as_json"] else "text"


def show_file(path: str, options: dict[str, Any]) -> int:
    from gptctl.logs.local_files import LocalFile

    # Both need records of the job: which ranks failed, and whether it has ended.
    if options["failed"] or options["follow"]:
        raise UserError(
            f"{path} is a file, not a job", "--follow and --failed need a job", WRONG_USAGE
        )
    if options["metrics"]:
        from gptctl.cli import ui
        from gptctl.jobs.run_metrics import file_rows

        rows = file_rows(Path(path), say=ui.say)
        return print_metrics(rows, options["tail"], options["as_json"])
    # A file has no job that could still write to it.
    return print_logs_or_report(
        path, LocalFile(Path(path)), wanted_of(options, None), options, is_over=lambda: True
    )


def no_such_file(path: str) -> UserError:
    what = "is a folder" if os.path.isdir(path) else "does not exist"
    hint = "give the path of a log file, or the id of a job: see `gptctl list`"
    return UserError(f"{path} {what}", hint, WRONG_USAGE)


def print_logs_or_report(
    job: str,
    files: LogFiles,
    wanted: FileFilter,
    options: dict[str, Any],
    is_over: Callable[[], bool],
) -> int:
    """Print lines or the list of files; `job` can also be the path of a file."""
    from gptctl.cli import ui
    from gptctl.logs.printer import show_logs

    if options["list_them"]:
        # Only this report needs the job's state, and on Slurm that is a query: ask for it last.
        print_list(files, wanted, options["as_json"], is_over())
    else:
        lines, style = lines_of(options), style_of(options)
        # Who asks for certain lines, or for raw ones, gets them all.
        hides = sys.stdout.isatty() and style == "text" and not (lines.grep or lines.errors)
        show_logs(files, wanted, lines, style, say=ui.say, hide_config_of=job if hides else "")
    return 0


def print_list(
    files: LogFiles, wanted: FileFilter, as_json: bool = False, job_is_over: bool = False
) -> None:
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.logs.tables import LIST_COLUMNS, list_cells, list_rows
    from gptctl.text import count

    rows = list_rows(files, wanted, job_is_over)
    if as_json:
        ui.print_json(rows)
    else:
        # In a narrow window, the name of a file tells its rank or node.
        columns = [Column(name, importance=LIST_IMPORTANCE.get(name, 0)) for name in LIST_COLUMNS]
        ui.print_table(count(len(rows), "log file"), columns, list_cells(rows), by_first=True)


def rows_of(session: Session, record: JobRecord, options: dict[str, Any]) -> list[Row]:
    """Return the rows of the whole run, or those of the attempts or ranks that were asked for."""
    from gptctl.cli import ui
    from gptctl.jobs.resume import lineage
    from gptctl.jobs.run_metrics import each_attempt, job_rows, removed_steps, whole_run
    from gptctl.logs.metric_rows import run_rows

    wanted = wanted_of(options, record.per_node)
    if options["all_attempts"]:
        return each_attempt(job_rows(record, wanted, say=ui.say))
    if any(options[name] is not None for name in ("attempt", "rank", "node")):
        return run_rows(job_rows(record, wanted, say=ui.say))
    jobs = lineage(record, session.store)
    rows = whole_run(jobs, say=ui.say)
    for note in removed_steps(jobs, rows):
        ui.say(note)
    return rows


def print_metrics(
    rows: list[Row], tail: int | None = None, as_json: bool = False, job: str = ""
) -> int:
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.logs.metric_rows import NO_STEPS, metric_table, with_all_names
    from gptctl.text import count

    if not rows:
        ui.say(NO_STEPS)
    rows = rows if tail is None else rows[max(0, len(rows) - tail) :]
    # JSON keeps full numbers; the table rounds them.
    if as_json:
        ui.print_json(with_all_names(rows))
    else:
        names, cells = metric_table(rows, job)
        columns = [Column(name, importance=METRIC_IMPORTANCE.get(name, 0)) for name in names]
        ui.print_table(count(len(rows), "step"), columns, cells)
    return 0


def print_failure(
    files: LogFiles,
    attempt: int | None = None,
    as_json: bool = False,
    job: str = "JOB",
    is_over: bool = False,
    known: Cause | None = None,
    **of_job: Any,
) -> bool:
    """Print the failure report, and return whether anything has failed.

    `is_over`: the job has ended, and all records are here; `known`: its first failure, as its state
    tells it.
    """
    from gptctl.cli import ui
    from gptctl.logs.tables import failure_report

    report = failure_report(files, attempt, of_job.get("state", ""), is_over, known)
    # The state of the job explains failures that no rank caused, such as a time limit.
    if as_json:
        ui.print_json({**of_job, **report.as_json()})
    else:
        ui.print_text("\n".join(report.lines(job)))
    return report.failure.is_failure


def show_failure(
    session: Session, record: JobRecord, files: LogFiles, options: dict[str, Any]
) -> int:
    """Print the state of the job, then which rank failed first."""
    from gptctl.cli import ui
    from gptctl.engine.run_folder import RunFolder

    # The state comes first: the first rank to exit did not cause a time limit or a cancellation.
    state = session.state_of(record)
    if not options["as_json"]:
        ui.print_state(record.id, str(state))
    is_over = RunFolder(record.local_dir).is_complete(state.state)
    how = options["attempt"], options["as_json"], record.id, is_over
    print_failure(files, *how, known=state.failure, **state.as_json())
    # The report was printed, so the command succeeded, whatever the job did.
    return 0
