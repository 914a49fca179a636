"""The verb `rm`: remove the run folders of jobs, after asking."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord

MAX_REMOVED = 8  # jobs at the same time: each asks its own hosts in parallel


@click.command(epilog=examples("gptctl rm gpt-3f9a2c", "gptctl rm gpt-3f9a2c gpt-77b010 --yes"))
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--here", "here_only", is_flag=True, help="Remove only the copies on this machine.")
@as_json_option
@click.pass_obj
def rm(session: Session, jobs: tuple[str, ...], yes: bool, here_only: bool, as_json: bool) -> int:
    """Remove the run folders of jobs; their history stays.

    This deletes the logs and checkpoints in the folder, also on other hosts. `gptctl list --all`
    and `gptctl status JOB` still show how the job ended. Folders elsewhere stay, such as a
    --log-dir or output_dir of your own. gptctl refuses a running job, and a job that an unfinished
    one needs.
    """
    from gptctl.cli import ui
    from gptctl.engine.atomic_files import private_files
    from gptctl.jobs.remove import check_removable, folders_outside, remove, removed_before
    from gptctl.remote.parallel import in_parallel

    # Check all jobs before removing one: after a typing error nothing is removed.
    records = list({record.id: record for record in map(session.find, jobs)}.values())
    for record in records:
        check_removable(record, session.store, session.backends)
    warn_of_losses(records, session)
    if not yes and not agrees(records):
        ui.say("nothing was removed")
        return ANSWER_IS_NO
    facts = [
        {
            "job": record.id,
            "run_dir": record.local_dir,
            "kept": folders_outside(record),
            "already_removed": removed_before(record) is not None,
        }
        for record in records
    ]
    # All at once: one on hosts that do not answer must not delay the others. The umask belongs to
    # the process, not to a thread.
    with private_files():
        results = in_parallel(
            lambda record: remove(record, session.backends, here_only), records, MAX_REMOVED
        )
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


def warn_of_losses(records: list[JobRecord], session: Session) -> None:
    """Name the jobs that are a part of the same run, and stay."""
    from gptctl.cli import ui
    from gptctl.jobs.remove import continued_by

    going = {record.id for record in records}
    for record in records:
        if others := [job for job in continued_by(record, session.store) if job not in going]:
            lost = "its steps and checkpoints will be missing from that run"
            ui.say(f"warning: {record.id} is continued by {', '.join(others)}: {lost}")


def agrees(records: list[JobRecord]) -> bool:
    """Show what would be deleted, and ask."""
    from gptctl.cli import ui
    from gptctl.jobs.remove import size_of
    from gptctl.text import count

    if not sys.stdin.isatty():
        message = "rm asks before it deletes, and this is not a terminal"
        raise UserError(message, "--yes removes without asking", WRONG_USAGE)
    for record in records:
        ui.say(f"{record.id}: {record.local_dir}, {size_of(record.run_folder):,} bytes")
    try:
        return click.confirm(f"remove {count(len(records), 'run folder')}?", err=True)
    except click.Abort:  # Ctrl-C, or the end of stdin
        return False
