"""The verb `cost`: where the GPU hours of jobs went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord

RECENT = "7d"
# Of the columns of accounts that do not fit, the one with the highest number goes first.
IMPORTANCE = {
    "compute": 0,
    "repeated": 1,
    "wait": 2,
    "data": 5,
    "checkpoint": 6,
    "evaluation": 7,
    "starting": 3,
    "hang": 4,
    "idle": 5,
    "unknown": 8,
}


@click.command(
    epilog=examples("gptctl cost", "gptctl cost gpt-3f9a2c", "gptctl cost --since 30d --by cluster")
)
@click.argument("jobs", nargs=-1, shell_complete=complete_job, metavar="[JOBS...]")
@click.option(
    "--since",
    metavar="TIME",
    help=f"Count from then on: a time, or an age such as 12h or {RECENT} (default without JOBS).",
)
@click.option(
    "--by",
    type=click.Choice(["job", "user", "cluster", "cause"]),
    default="job",
    show_default=True,
    help="Sum up by this. A cause is why an attempt failed.",
)
@as_json_option
@click.pass_obj
def cost(
    session: Session, jobs: tuple[str, ...], since: str | None, by: str, as_json: bool
) -> None:
    """Show where the GPU hours of jobs went.

    Every second of every GPU is in one account: compute, repeated (steps done again after a
    failure), wait (for other ranks), data, saving, eval, starting, hang, and idle. Programs that
    are not the bundled trainer have unknown instead. Goodput is the share of compute. With one JOB,
    each of its attempts has a row.
    """
    from gptctl.cli import ui
    from gptctl.jobs.costs import summed

    started = _moment(since or ("" if jobs else RECENT))
    records = [session.find(job) for job in jobs] or session.store.records()
    rows = _rows(session, records, started, by_cause=by == "cause", with_empty=bool(jobs))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    total = {**summed(rows), "since": started or None}
    if as_json:
        found = rows if by == "job" else [{by: name, **summed(g)} for name, g in groups.items()]
        ui.print_json({"rows": found, "total": total})
        return
    if len(records) == 1 and by == "job" and rows:
        _print_attempts(rows[0])
        return
    shown = [(name, summed(group)) for name, group in groups.items()]
    _print_table(by, shown, total)


def _moment(text: str) -> float:
    from gptctl.logs.lines import parse_since

    return parse_since(text) if text else 0.0


def _rows(
    session: Session, records: list[JobRecord], started: float, by_cause: bool, with_empty: bool
) -> list[dict[str, Any]]:
    """A row for each job; for each attempt if causes are asked for."""
    from gptctl.cli import ui
    from gptctl.deadline import Deadline
    from gptctl.jobs import job_status
    from gptctl.jobs.costs import EarlierSteps, attempt_rows, cost_row, ledger_of_job, user_of
    from gptctl.jobs.costs import since as after

    # Of jobs that are named, new records of other machines are copied first, as by `plot`.
    for record in records if with_empty else ():
        session.catch_up(record)
    now = time.time()
    states = job_status.states_of(records, session.backends, Deadline(3.0))
    found, earlier = [], EarlierSteps(session.store)
    with ui.status_line() as show:
        for number, (record, state) in enumerate(zip(records, states)):
            show(f"reading {record.id}, {number + 1:,} of {len(records):,}")
            if with_empty and not record.run_folder.is_dir():
                ui.say(f"the folder of {record.id} is missing: only what gptctl rm kept is counted")
            ledger = after(ledger_of_job(record, state.state, earlier, now), started)
            if not ledger.attempts and not with_empty:
                continue
            who = {"job": record.id, "user": user_of(record), "cluster": record.cluster}
            parts = [ledger]
            if by_cause:
                parts = [ledger._replace(attempts=[each]) for each in ledger.attempts]
            for part in parts:
                cause = part.attempts[-1].cause if part.attempts else ""
                facts = {**who, "state": state.state, "cause": cause or "none"}
                found.append({**facts, **cost_row(part), "attempts": attempt_rows(part)})
    return found


def _print_attempts(row: dict[str, Any]) -> None:
    from gptctl.cli import ui
    from gptctl.jobs.cost_text import hours_text
    from gptctl.jobs.ledger import goodput_of

    accounts = _used([row])
    columns = [Column("attempt"), *_columns(accounts), Column("cause", "wrap", importance=1)]
    cells = []
    for each in row["attempts"]:
        allocation = each["gpus"] * (each["ended"] - each["began"])
        goodput = goodput_of(each["accounts"], allocation)
        facts = {"allocation": allocation, "accounts": each["accounts"], "goodput": goodput}
        cells.append([each["attempt"], *_cells(facts, accounts), each["cause"] or ""])
    cells.append(["all", *_cells(row, accounts), ""])
    queued = f"; queued {hours_text(row['queued'])}" if row["queued"] >= 1 else ""
    again = f"; {row['repeated_steps']:,} steps repeated" if row["repeated_steps"] else ""
    ui.print_table(f"{row['job']}: {row['state']}{queued}{again}", columns, cells)


def _print_table(by: str, rows: list[tuple[str, dict[str, Any]]], total: dict[str, Any]) -> None:
    from gptctl.cli import ui
    from gptctl.text import clock_time, count

    accounts, counted = _used([total]), [] if by == "job" else ["jobs"]
    counts = [Column(name, importance=9) for name in counted]
    columns = [Column(by), *counts, *_columns(accounts)]
    shown = [*rows, ("all", total)] if len(rows) > 1 else rows
    cells = [[name, *(row[n] for n in counted), *_cells(row, accounts)] for name, row in shown]
    since = f" since {clock_time(total['since'])}" if total["since"] else ""
    ui.print_table(f"{count(total['jobs'], 'job')}{since}", columns, cells)


def _used(rows: list[dict[str, Any]]) -> list[str]:
    """The accounts that have any time: most jobs have no hang."""
    from gptctl.jobs.ledger import ACCOUNTS

    return [name for name in ACCOUNTS if any(row["accounts"][name] > 0 for row in rows)]


def _columns(accounts: list[str]) -> list[Column]:
    from gptctl.jobs.cost_text import SHORT_NAMES

    named = [Column(SHORT_NAMES.get(n, n), importance=IMPORTANCE[n]) for n in accounts]
    return [Column("GPU time"), Column("goodput"), *named]


def _cells(row: dict[str, Any], accounts: list[str]) -> list[str]:
    from gptctl.jobs.cost_text import hours_text, share_text

    allocation, goodput = row["allocation"], row["goodput"]
    return [
        hours_text(allocation),
        "" if goodput is None else f"{goodput:.0%}",
        *(share_text(row["accounts"][name], allocation) for name in accounts),
    ]
