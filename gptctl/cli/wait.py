"""The verb `wait`, and waiting at the end of others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gptctl.cli.options import INTERRUPTED, as_json_option, examples, job_argument
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, UserError

if TYPE_CHECKING:
    from gptctl.backends import State
    from gptctl.jobs.store import JobRecord


@click.command(epilog=examples("gptctl wait", "gptctl wait gpt-3f9a2c --timeout 600 && echo done"))
@job_argument(required=False)
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Give up after so long."
)
@as_json_option
def wait(job: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait for a job to end. Exit code 0: completed; 1: it ended otherwise, or not in time."""
    from gptctl.cli import ui
    from gptctl.cli.jobs import find_job
    from gptctl.jobs import report as job_report

    record = find_job(job)
    try:
        code = wait_for(record, timeout, quiet=as_json)
    except KeyboardInterrupt:
        ui.say(job_report.goes_on(record))
        return INTERRUPTED
    if as_json:
        ui.print_json(job_report.row(record))
    return code


def wait_until_final(record: JobRecord, timeout: float | None) -> State:
    from gptctl.cli import ui
    from gptctl.engine.run_folder import UNKNOWN
    from gptctl.jobs import report as job_report

    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = ""
    while not job_report.is_final(state := job_report.state_of(record)):
        if state.state != shown:
            shown = state.state
            ui.say(f"{record.id}: {state if state.state == UNKNOWN else shown}")
        if state.state == UNKNOWN and (
            record.kind == "local" or not record.handle
        ):  # no scheduler will ever answer
            raise UserError(f"{record.id}: {state.reason}", "", OUT_OF_REACH)
        if deadline and time.monotonic() > deadline:
            raise UserError(
                f"{record.id} is still {state.state}", "wait longer, or cancel it", ANSWER_IS_NO
            )
        time.sleep(0.2)
    return state


def wait_for(record: JobRecord, timeout: float | None, quiet: bool = False) -> int:
    from gptctl.backends import backend_of
    from gptctl.cli import ui
    from gptctl.jobs import report as job_report

    state = job_report.state_of(record)
    if not job_report.is_final(state):
        with backend_of(record.kind).following(record):
            state = wait_until_final(record, timeout)
    if not quiet:
        ui.print_text(f"{record.id}: {state}")
    return job_report.verdict(state)
