"""The verb `report`: one HTML file about runs, to look at and to send to others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.run_report import RunReport

STDOUT = "-"
SEVERAL = "report.html"
MOST_RUNS = 64
HEAD = 4096  # bytes of a file in which a report says that it is one


@click.command(
    epilog=examples(
        "gptctl report",
        "gptctl report gpt-3f9a2c gpt-77b0d1 --output runs.html",
        "gptctl report --output - | ssh web 'cat > public/run.html'",
    )
)
@click.argument("jobs", nargs=-1, shell_complete=complete_job, metavar="[JOBS...]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help=f"Write here; - is stdout (default: JOB.html, of several jobs {SEVERAL}).",
)
@as_json_option
@click.pass_obj
def report(session: Session, jobs: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Write an HTML report about one or more jobs, to look at in a browser.

    One file that needs nothing else, also offline: curves, time by attempt and account, speed of
    every rank, failures, events and config. Several jobs are overlaid, and compared with the first.
    A job that continues others is one run with them. A JOB can also be the path of a metrics.jsonl.
    Without JOBS: the latest job of this folder, or else your latest. A report is written over an
    older one, but over no other file.
    """
    from gptctl.cli import ui

    asked = list(dict.fromkeys(jobs))
    if len(asked) > MOST_RUNS:
        message = f"{len(asked)} jobs are too many for one report"
        raise UserError(message, f"name at most {MOST_RUNS}", WRONG_USAGE)
    if output == "":
        raise UserError("--output is empty", "name a file, or leave it out", WRONG_USAGE)
    if as_json and output == STDOUT:
        raise UserError("--json and --output - both use stdout", "leave one out", WRONG_USAGE)
    runs = _gathered(session, asked or [None])
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        ui.say(note)
    text = _page(runs)
    if output == STDOUT:
        ui.print_exactly(text)
        return
    file = Path(output or _file_name(runs))
    _write(file, text)
    if as_json:
        facts = {"file": str(file.absolute()), "bytes": len(text.encode())}
        ui.print_json({**facts, "runs": [run.job for run in runs]})
    else:
        ui.print_text(f"wrote {file}")


def _gathered(session: Session, jobs: Sequence[str | None]) -> list[RunReport]:
    from gptctl.cli import ui
    from gptctl.jobs.run_report import report_of_file, report_of_job

    found: list[RunReport] = []
    with ui.status_line() as show:
        for job in jobs:
            record = session.run_or_file(job)
            if isinstance(record, Path):
                found.append(report_of_file(record))
                continue
            # Copy new lines of remote hosts first.
            session.catch_up(record)
            show(f"reading {record.id}")
            if record.id not in {run.job for run in found}:
                found.append(report_of_job(record, session.store, session.backends, time.time()))
    return found


def _page(runs: Sequence[RunReport]) -> str:
    from gptctl.engine.file_reading import load_bytes
    from gptctl.pages.run_page import Assets, page
    from gptctl.spec.resources import folder

    style, script = (
        load_bytes(folder("templates") / "report" / f"report.{kind}").decode()
        for kind in ("css", "js")
    )
    return page(runs, Assets(style, script), time.time())


def _file_name(runs: Sequence[RunReport]) -> str:
    if len(runs) > 1:
        return SEVERAL
    # A file's report is written next to it.
    return f"{runs[0].job}.html"


def _write(file: Path, text: str) -> None:
    from gptctl.engine.atomic_files import replacing
    from gptctl.engine.file_reading import read_bytes
    from gptctl.pages.run_page import generator_tag

    # A link leads to the file that is meant: a folder of a web server, say.
    target = Path(os.path.realpath(file))
    head = read_bytes(target, HEAD)
    is_ours = head.startswith(b"<!DOCTYPE html>") and generator_tag().encode() in head
    if os.path.lexists(file) and not is_ours:
        hint = "choose another --output, or remove it"
        message = f"{file} exists and is not a gptctl report: not overwritten"
        raise UserError(message, hint, WRONG_USAGE)
    try:
        mode = os.stat(target).st_mode & 0o777 if is_ours else 0o600
        with replacing(target) as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text.encode())
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError(
            f"cannot write {file}: {problem}", "choose another --output", OUT_OF_REACH
        ) from None
