"""The verb `rm`: remove the run folders of jobs, named or chosen by age, after asking."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, complete_job, examples, filter_options, moment
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.disk_use import DiskUse
    from gptctl.jobs.old_runs import OldRuns, Rules
    from gptctl.jobs.store import JobRecord

MAX_REMOVED = 8  # jobs at the same time: each asks its own hosts in parallel
MOST_SHOWED = 20  # jobs that are listed before the question


@click.command(
    epilog=examples(
        "gptctl rm gpt-3f9a2c",
        "gptctl rm --older 30d --keep 5 --dry-run",
        "gptctl rm --state FAILED --tag exp=lr --yes",
    )
)
@click.argument("jobs", nargs=-1, metavar="[JOB…]", shell_complete=complete_job)
@filter_options
@click.option(
    "--older", type=moment, metavar="TIME", help="Only jobs that ended before: 30d, 2026-11-01."
)
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N of these jobs."
)
@click.option(
    "--with-newest-checkpoints",
    is_flag=True,
    help="Also remove the newest verified checkpoint of a run.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--here", "here_only", is_flag=True, help="Remove only the copies on this machine.")
@as_json_option
@click.pass_obj
def rm(
    session: Session,
    /,
    jobs: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    here_only: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Remove the run folders of jobs; their history stays.

    This deletes the logs and checkpoints in the folder, also on other hosts. `gptctl list --all`
    and `gptctl status JOB` still show how the job ended. Folders elsewhere stay, such as a
    --log-dir or output_dir of your own. gptctl refuses a running job, and a job that an unfinished
    one needs.

    Instead of naming jobs, choose old ones by --older, --keep, --state, --tag and --cluster. Of
    these, the folder with the newest verified checkpoint of a run stays: the run can be resumed.
    """
    from gptctl.cli import ui
    from gptctl.cli.listing import measured
    from gptctl.jobs.old_runs import refusals

    rules = rules_of(jobs, **chosen)
    found = chosen_runs(session, rules) if rules else named_runs(session, jobs)
    sizes = measured(found.removable) if dry_run or not yes else {}
    if dry_run:
        show_plan(found, sizes, as_json, is_listing=rules is not None)
        return 0
    if rules:
        tell_staying(found)
    warn_of_losses(found.removable, session)
    if not found.removable:
        # Nothing is too old: for a script that cleans up every night this is success.
        if as_json:
            ui.print_json([])
        return 0
    if yes:
        return remove_runs(session, found.removable, {}, here_only, as_json)
    if not agrees(found.removable, sizes):
        ui.say("nothing was removed")
        return ANSWER_IS_NO
    # Again: while the question was open, another job may have been submitted that needs one.
    refused = refusals(found.removable, session.store.records(), session.backends)
    return remove_runs(session, found.removable, refused, here_only, as_json)


def rules_of(
    jobs: Sequence[str],
    states: tuple[str, ...],
    tags: tuple[str, ...],
    clusters: tuple[str, ...],
    older: float | None,
    keep: int | None,
    with_newest_checkpoints: bool,
) -> Rules | None:
    """The rules by which old runs are chosen; None if jobs are named."""
    from gptctl.jobs.labels import parse_tags
    from gptctl.jobs.old_runs import Rules
    from gptctl.jobs.selection import Filters, parse_states

    filters = Filters(tuple(parse_tags(tags)), clusters, None, parse_states(states))
    rules = Rules(filters, older, keep or 0, with_newest_checkpoints)
    is_chosen = bool(filters.words() or keep or older is not None)
    if jobs and (is_chosen or with_newest_checkpoints):
        message = "name jobs, or choose them by options: not both"
        raise UserError(message, "omit the names, or the options that choose jobs", WRONG_USAGE)
    if not jobs and not is_chosen:
        hint = "name them, or choose old ones: gptctl rm --older 30d --dry-run"
        raise UserError("no job is named", hint, WRONG_USAGE)
    return None if jobs else rules


def named_runs(session: Session, jobs: Sequence[str]) -> OldRuns:
    """The jobs that were named; raise UserError if one of them cannot be removed."""
    from gptctl.jobs.job_status import known_states
    from gptctl.jobs.old_runs import OldRuns, refusals
    from gptctl.jobs.store import NEWEST

    # Check all jobs before removing one: after a typing error nothing is removed.
    records = list({record.id: record for record in map(session.find, jobs)}.values())
    refused = refusals(records, session.store.records(last=NEWEST), session.backends)
    for error in refused.values():
        raise error
    return OldRuns(records, [], known_states(records, session.backends))


def chosen_runs(session: Session, rules: Rules) -> OldRuns:
    from gptctl.jobs.old_runs import old_runs

    found = old_runs(rules, session.store, session.backends)
    session.report_damage()
    return found


def show_plan(found: OldRuns, sizes: dict[str, DiskUse], as_json: bool, is_listing: bool) -> None:
    """Print what would be removed, and what stays."""
    from gptctl.cli import ui
    from gptctl.jobs.disk_use import total_use
    from gptctl.jobs.old_runs import ended_at
    from gptctl.jobs.remove import folders_outside
    from gptctl.text import clock_time, count

    going: list[dict[str, Any]] = [
        {
            "job": record.id,
            "state": found.states[record.id].state,
            "created": record.created,
            "ended": ended_at(record),
            "size": sizes[record.id].bytes if record.id in sizes else None,
            "size_is_complete": sizes[record.id].is_complete if record.id in sizes else None,
            "run_dir": record.local_dir,
            "kept": folders_outside(record),
        }
        for record in found.removable
    ]
    staying = [
        {"job": each.record.id, "state": each.state.state, "why": each.why}
        for each in found.staying
    ]
    if as_json:
        ui.print_json({"remove": going, "stay": staying, "too_new": found.too_new})
        return
    cells = [
        [
            row["job"],
            row["state"],
            clock_time(row["ended"]) if row["ended"] else "",
            sizes.get(row["job"], ""),
            row["run_dir"],
        ]
        for row in going
    ]
    columns = [*map(Column, ("job", "state", "ended", "size")), Column("folder", "wrap")]
    total = total_use([*sizes.values()])
    ui.print_table(f"would remove {count(len(going), 'run folder')}, {total}", columns, cells)
    if staying:
        rows = [[*row.values()] for row in staying]
        ui.print_table(f"{count(len(rows), 'job')} would stay", ["job", "state", "why"], rows)
    if is_listing:
        tell_missing(found)


def tell_staying(found: OldRuns) -> None:
    """Say which old jobs stay, and why."""
    from gptctl.cli import ui

    for each in found.staying[:MOST_SHOWED]:
        ui.say(f"{each.record.id} stays: {each.why}")
    if (more := len(found.staying) - MOST_SHOWED) > 0:
        ui.say(f"and {more:,} more; --dry-run lists all of them")
    tell_missing(found)


def tell_missing(found: OldRuns) -> None:
    """Say why there is nothing to remove, or how many jobs are not old enough."""
    from gptctl.cli import ui
    from gptctl.text import count

    if found.nearest:
        ui.say(f"no job matches: {found.nearest}")
    if found.too_new:
        ui.say(f"{count(found.too_new, 'job')} ended later than that")
    if not found.removable:
        ui.say("nothing to remove")


def remove_runs(
    session: Session,
    records: Sequence[JobRecord],
    refused: Mapping[str, UserError],
    here_only: bool,
    as_json: bool,
) -> int:
    from gptctl.cli import ui
    from gptctl.engine.atomic_files import private_files
    from gptctl.jobs.remove import folders_outside, remove, removed_before
    from gptctl.remote.parallel import in_parallel

    facts = [
        {
            "job": record.id,
            "run_dir": record.local_dir,
            "kept": folders_outside(record),
            "already_removed": removed_before(record) is not None,
        }
        for record in records
    ]

    def remove_one(record: JobRecord) -> float:
        if record.id in refused:
            raise refused[record.id]
        return remove(record, session.backends, here_only)

    # All at once: one on hosts that do not answer must not delay the others. The umask belongs to
    # the process, not to a thread.
    with private_files():
        results = in_parallel(remove_one, records, MAX_REMOVED)
    answers = [removal(*pair) for pair in zip(facts, results)]
    problems = [result for result in results if isinstance(result, UserError)]
    if as_json:
        ui.print_json(answers)
    else:
        ui.print_text("\n".join(map(described, answers)))
    for problem in problems:
        ui.print_error(problem)
    # The most serious problem decides, as if the jobs had been removed one by one.
    return max((problem.exit_code for problem in problems), default=0)


def removal(facts: dict[str, Any], result: float | Exception) -> dict[str, Any]:
    """What became of one job: when it was removed, or why it was not."""
    if isinstance(result, UserError):
        return {**facts, "removed": None, "error": result.message}
    if isinstance(result, Exception):
        raise result
    return {**facts, "removed": result}


def described(answer: dict[str, Any]) -> str:
    from gptctl.text import clock_time

    if answer["already_removed"] and answer["removed"]:
        return f"{answer['job']}: already removed {clock_time(answer['removed'])}"
    kept = f"; not removed: {', '.join(answer['kept'])}" if answer["kept"] else ""
    return f"{answer['job']}: {'removed' if answer['removed'] else 'not removed'}{kept}"


def warn_of_losses(records: Sequence[JobRecord], session: Session) -> None:
    """Name the jobs that are a part of the same run, and stay."""
    from gptctl.cli import ui
    from gptctl.jobs.remove import continued_by
    from gptctl.jobs.store import NEWEST

    going = {record.id for record in records}
    known = session.store.records(last=NEWEST)
    for job, continuing in continued_by(records, known).items():
        if others := [other for other in continuing if other not in going]:
            lost = "its steps and checkpoints will be missing from that run"
            ui.say(f"warning: {job} is continued by {', '.join(others)}: {lost}")


def agrees(records: Sequence[JobRecord], sizes: dict[str, DiskUse]) -> bool:
    """Show what would be deleted, and ask."""
    from gptctl.cli import ui
    from gptctl.jobs.disk_use import total_use
    from gptctl.text import count

    if not sys.stdin.isatty():
        message = "rm asks before it deletes, and this is not a terminal"
        raise UserError(message, "--yes removes without asking", WRONG_USAGE)
    for record in records[:MOST_SHOWED]:
        ui.say(f"{record.id}: {record.local_dir}, {sizes.get(record.id, 'no folder')}")
    if (more := len(records) - MOST_SHOWED) > 0:
        ui.say(f"and {more:,} more; --dry-run lists all of them")
    try:
        question = f"remove {count(len(records), 'run folder')}, {total_use([*sizes.values()])}?"
        return click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or the end of stdin
        return False
