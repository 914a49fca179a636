"""The verb `plot`: draw what jobs measured, as curves over their steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session, require_folder
from trainer.errors import ANSWER_IS_NO, UserError

if TYPE_CHECKING:
    from gptctl.logs.metric_rows import Row

NOT_METRICS = ("job", "attempt", "step", "time", "max_steps")


@click.command(
    epilog=examples(
        "gptctl plot",
        "gptctl plot gpt-3f9a2c gpt-77b0d1 --metric valid_loss",
        "gptctl plot --metric loss --metric valid_loss",
    )
)
@click.argument("jobs", nargs=-1, shell_complete=complete_job, metavar="[JOBS...]")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    default=("loss",),
    show_default=True,
    metavar="NAME",
    help="Plot this metric: loss, valid_loss, lr, grad_norm, tokens_per_second, …; repeatable.",
)
@as_json_option
@click.pass_obj
def plot(session: Session, jobs: tuple[str, ...], metrics: tuple[str, ...], as_json: bool) -> None:
    """Plot the loss, or another metric, of one or more jobs.

    Without JOBS: the latest job of this folder, or else your latest. Several jobs share one chart.
    A job that continues others is one curve with them; where steps overlap, the later job counts.
    A job can also be the path of a metrics.jsonl or of a log file. For your own scripts, gptctl
    reads the log lines in FleetX's style.
    """
    from gptctl.cli import ui

    runs = [run_of(session, job, metrics) for job in dict.fromkeys(jobs or (None,))]
    drawn = [
        curve
        for run in runs
        for metric in dict.fromkeys(metrics)
        for curve in curves_of(run, metric)
    ]
    if as_json:
        ui.print_json(drawn)
        return
    for text in missing(runs, drawn, metrics):
        ui.say(text)
    if not drawn:
        # All names are read only now: of a long run, all numbers need much memory.
        runs = [run_of(session, run["job"], None) for run in runs]
        raise UserError("nothing to plot", available_metrics(runs), ANSWER_IS_NO)
    ui.print_exactly(chart_of(drawn, metrics))


def run_of(session: Session, job: str | None, metrics: tuple[str, ...] | None) -> dict[str, Any]:
    """Read these metrics of the run of a job, or of a file; None: all that there are."""
    from gptctl.cli import ui
    from gptctl.jobs.resume import lineage
    from gptctl.jobs.run_metrics import file_rows, removed_steps, whole_run

    record = session.run_or_file(job)
    if isinstance(record, Path):
        return {"job": job, "run": [job], "rows": file_rows(record, metrics, ui.say)}
    require_folder(record)
    # Copy new lines of remote hosts first.
    session.catch_up(record)
    records = lineage(record, session.store)
    ids = [each.id for each in reversed(records)]
    rows = whole_run(records, metrics, ui.say)
    for note in removed_steps(records, rows) if metrics else ():
        ui.say(note)
    return {"job": record.id, "run": ids, "rows": rows}


def curves_of(run: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """Return the curve of a run, as a list of at most one."""
    from gptctl.logs.metric_rows import is_number

    rows: list[Row] = run["rows"]
    points = [(row["step"], row[metric]) for row in rows if is_number(row.get(metric))]
    if not points or metric in NOT_METRICS:
        return []
    steps, values = (list(numbers) for numbers in zip(*points))
    return [
        {"job": run["job"], "run": run["run"], "metric": metric, "steps": steps, "values": values}
    ]


def missing(
    runs: list[dict[str, Any]], drawn: list[dict[str, Any]], metrics: tuple[str, ...]
) -> list[str]:
    """Name what was asked for and cannot be drawn."""
    found = {(curve["job"], curve["metric"]) for curve in drawn}
    asked = dict.fromkeys((run["job"], metric) for run in runs for metric in metrics)
    return [f"{job} has no {metric}" for job, metric in asked if (job, metric) not in found]


def available_metrics(runs: list[dict[str, Any]]) -> str:
    from gptctl.logs.metric_rows import NO_STEPS

    names = {
        name: None
        for run in runs
        for row in run["rows"]
        for name, value in row.items()
        if value is not None and name not in NOT_METRICS
    }
    if not names:
        return NO_STEPS
    return f"available: {', '.join(names)}"


def chart_of(drawn: list[dict[str, Any]], metrics: tuple[str, ...]) -> str:
    from gptctl.cli import ui
    from gptctl.cli.chart import Curve, draw
    from gptctl.text import clean

    several = len(metrics) > 1
    curves = [
        Curve(
            clean(f"{each['job']} {each['metric']}" if several else each["job"]),
            each["steps"],
            each["values"],
        )
        for each in drawn
    ]
    title = ", ".join(dict.fromkeys(each["metric"] for each in drawn))
    return draw(title, curves, ui.chart_size(), sys.stdout.isatty() and ui.has_colours())
