"""The verb `diff`: how two jobs differ, in what was recorded of them and in what they measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptctl.cli.options import NumberRange, as_json_option, complete_job, examples
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.comparison import Comparison, Run, Section
    from gptctl.jobs.metric_differences import LastValue
    from gptctl.jobs.run_facts import Value
    from gptctl.jobs.store import JobRecord

MOST_ROWS = 40  # of a section; --all shows more
LONGEST = 300  # characters of a value
LARGE = 1e6
COLOURS = {"+": "green", "-": "red", "@": "cyan"}  # of the lines of a unified diff


@click.command(
    epilog=examples(
        "gptctl diff gpt-3f9a2c gpt-77b0d1",
        "gptctl diff gpt-3f9a2c-2 --code",
        "gptctl diff gpt-3f9a2c gpt-77b0d1 --tolerance 0.01 --json",
    )
)
@click.argument("job", shell_complete=complete_job, metavar="A")
@click.argument("other", required=False, shell_complete=complete_job, metavar="[B]")
@click.option("--all", "everything", is_flag=True, help="Show equal values, too.")
@click.option("--code", "show_code", is_flag=True, help="Show the lines of code that differ.")
@click.option(
    "--tolerance",
    type=NumberRange(min=0),
    default=1e-6,
    show_default=True,
    metavar="X",
    help="Ignore smaller differences of losses and evaluations.",
)
@as_json_option
@click.pass_obj
def diff(
    session: Session,
    job: str,
    other: str | None,
    everything: bool,
    show_code: bool,
    tolerance: float,
    as_json: bool,
) -> int:
    """Compare two jobs: config, code, environment, data and metrics.

    Shows what differs, and where each value came from. With A alone: compares the job that A
    continues, or of which it is a rerun, with A. Jobs that continue each other count as one run. A
    can also be the path of a metrics.jsonl. Ids, times and speeds never count as a difference.

    Exits with 0 if nothing differs, 1 if something does, 2 after wrong usage.
    """
    from gptctl.cli import ui
    from gptctl.jobs.comparison import compare, comparison_json

    names = [job, other] if other is not None else list(earlier_and(session, job))
    runs = [run_of(session, name) for name in names]
    found = compare(runs[0], runs[1], tolerance)
    lines = code_lines(session, found) if show_code else None
    if as_json:
        code = {} if lines is None else {"code_diff": lines}
        ui.print_json({**comparison_json(found, everything), **code})
    else:
        show(found, everything, lines)
    return 0 if found.is_equal else ANSWER_IS_NO


def earlier_and(session: Session, job: str) -> tuple[str, str]:
    """The job that this one continues, or of which it is a rerun, and the job itself."""
    if "/" in job:
        raise UserError("there is one file only", "give two: gptctl diff A B", WRONG_USAGE)
    record = session.find(job)
    earlier = record.continues or record.rerun_of
    if not earlier:
        hint = f"name the other one: gptctl diff {record.id} {similar(session, record)}"
        message = f"{record.id} neither continues a job nor is a rerun of one"
        raise UserError(message, hint, WRONG_USAGE)
    return earlier, record.id


def similar(session: Session, record: JobRecord) -> str:
    """A job to compare with: the latest earlier one of the same name, if there is one."""
    others = [each.id for each in session.store.records() if each.name == record.name]
    before = others[: others.index(record.id)] if record.id in others else []
    return before[-1] if before else "JOB"


def run_of(session: Session, job: str) -> Run:
    """Read what is known of a job, or of the file of a run that gptctl did not start."""
    from gptctl.cli import ui
    from gptctl.jobs.comparison import Run
    from gptctl.jobs.metric_differences import NEEDED
    from gptctl.jobs.resume import lineage
    from gptctl.jobs.run_facts import file_facts, job_facts
    from gptctl.jobs.run_metrics import file_rows, removed_steps, whole_run

    record = session.run_or_file(job)
    if isinstance(record, Path):
        return Run(job, file_facts(record), file_rows(record, NEEDED, ui.say))
    session.catch_up(record)
    records = lineage(record, session.store)
    rows = whole_run(records, NEEDED, ui.say)
    for note in removed_steps(records, rows):
        ui.say(note)
    if not record.run_folder.is_dir():
        ui.say(f"the folder of {record.id} is missing: only what is known without it is compared")
    line = tuple(each.id for each in reversed(records))
    return Run(record.id, job_facts(record), rows, line, record.created)


def code_lines(session: Session, found: Comparison) -> list[str]:
    """The unified diff of the code; files of runs that gptctl did not start have none."""
    from gptctl.jobs.code_differences import code_diff

    section = next(each for each in found.sections if each.name == "code")
    if "code" in (*section.lacking[0], *section.lacking[1]) or not (
        found.a.lineage and found.b.lineage
    ):
        return []
    one, other = (session.store.find(run.job).run_folder / "code" for run in (found.a, found.b))
    # State of git and templates are shown with their values only.
    names = [
        each.key
        for each in section.differences
        if any(os.path.lexists(folder / each.key) for folder in (one, other))
    ]
    return code_diff(one, other, names, (found.a.job, found.b.job))


def show(found: Comparison, everything: bool, lines: list[str] | None) -> None:
    """Print a comparison for people: only what differs, unless everything is asked for."""
    from gptctl.cli import ui

    for section in found.sections:
        show_section(section, found, everything)
    show_losses(found, everything)
    show_metrics(found, everything)
    if lines is not None:
        ui.print_coloured(lines or ["code: no lines to show"], COLOURS)
    if unknown := [each.name for each in found.sections if not each.is_recorded]:
        ui.print_text(f"not recorded for either: {', '.join(unknown)}")
    if found.is_equal:
        ui.print_text(f"{found.a.job} and {found.b.job}: no differences")


def show_section(section: Section, found: Comparison, everything: bool) -> None:
    from gptctl.cli import ui
    from gptctl.text import count

    values = section.values if everything else section.differences
    shown = values if everything else values[:MOST_ROWS]
    if shown:
        more = f"; {len(values) - len(shown)} more with --all" if len(shown) < len(values) else ""
        title = f"{section.name}: {count(len(section.differences), 'difference')}{more}"
        rows = [[each.key, cell(each.a), cell(each.b)] for each in shown]
        ui.print_table(title, columns(section.name, found), rows)
    for run, files in zip((found.a, found.b), section.lacking):
        if files:
            missing = ", ".join(files)
            ui.print_text(f"{section.name}: not recorded for {run.job} (no {missing})")


def columns(first: str, found: Comparison, *more: str) -> list[Column]:
    sides = ((found.a, "red"), (found.b, "green"))
    both = [Column(run.job, "wrap", colour=colour) for run, colour in sides]
    return [Column(first), *both, *map(Column, more)]


def cell(value: Value | None) -> str:
    """A value with its origin; an empty one is marked, so that it is seen."""
    from gptctl.text import plain_value

    text = plain_value(value.value) if value else ""
    cut = f"{text[:LONGEST]}…" if len(text) > LONGEST else text or "(none)"
    return f"{cut} ({value.origin})" if value and value.origin else cut


def show_losses(found: Comparison, everything: bool) -> None:
    from gptctl.cli import ui

    metrics = found.metrics
    if not metrics.losses or not (metrics.differing or everything):
        return
    rows = [
        [f"{each.step:,}", loss(each.a), loss(each.b), difference(each.difference)]
        for each in metrics.shown
    ]
    ui.print_table(losses_title(found), columns("step", found, "difference"), rows)


def losses_title(found: Comparison) -> str:
    from gptctl.text import count

    metrics = found.metrics
    steps = count(len(metrics.losses), "common step")
    if not metrics.differing:
        return f"loss: equal at {steps}"
    largest = "" if metrics.largest is None else f", by {metrics.largest:.3g} at most"
    first = f"{metrics.differing[0].step:,}"
    return f"loss: differs at {len(metrics.differing):,} of {steps}, first at {first}{largest}"


def show_metrics(found: Comparison, everything: bool) -> None:
    """The speed is always shown; it is never the same, so it does not count."""
    from gptctl.cli import ui

    metrics, rows = found.metrics, list[list[str]]()
    if any(metrics.speeds):
        ratio = "" if metrics.ratio is None else f" (× {metrics.ratio:.3g})"
        speeds = ["" if speed is None else f"{speed:,.0f}" for speed in metrics.speeds]
        rows.append(["tokens/s, median", speeds[0], f"{speeds[1]}{ratio}"])
    if everything or metrics.last_steps[0] != metrics.last_steps[1]:
        steps = ["(none)" if step is None else f"{step:,}" for step in metrics.last_steps]
        rows.append(["last step", *steps])
    for name, (a, b, is_equal) in metrics.final.items():
        if everything or not is_equal:
            rows.append([name, final_text(a), final_text(b)])
    if rows:
        ui.print_table("metrics", columns("metric", found), rows)


def final_text(last: LastValue | None) -> str:
    return "(none)" if last is None else f"{last.value:.6g} (step {last.step:,})"


def loss(value: float | None) -> str:
    if value is None:
        return "not finite"
    # A diverging loss can have any number of digits.
    return f"{value:.9f}" if abs(value) < LARGE else f"{value:.9g}"


def difference(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
