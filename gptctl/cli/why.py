"""The verb `why`: why a job waits, failed, or seems stuck, and what to do about it."""

from __future__ import annotations

import time

import click

from gptctl.cli.options import as_json_option, examples, job_argument
from gptctl.cli.session import Session
from trainer.errors import ANSWER_IS_NO


@click.command(
    epilog=examples("gptctl why", "gptctl why gpt-3f9a2c", "gptctl why gpt-3f9a2c --json")
)
@job_argument(required=False)
@as_json_option
@click.pass_obj
def why(session: Session, job: str | None, as_json: bool) -> int:
    """Explain why a job waits, failed, or seems stuck.

    A pending job: the scheduler's reason in words, idle nodes, its priority, and what would start
    sooner. A failed one: the first failure, its likely cause and the fix. A running one: how far it
    is, and whether it seems stuck. Without JOB: the latest job of this folder, or else your latest.
    Exit code 0: explained; 1: no explanation was found.
    """
    from gptctl.cli import ui
    from gptctl.cli.jobs import title_is_seen
    from gptctl.jobs.why import explain
    from gptctl.jobs.why_text import why_pairs

    record = session.find(job, announce=as_json or not title_is_seen())
    # Copy new files first: the failure is read from them.
    session.catch_up(record)
    facts = explain(record, session.backends)
    if as_json:
        ui.print_json(facts)
    else:
        ui.print_pairs(f"job {record.id}", why_pairs(facts, time.time()))
    return 0 if facts["explained"] else ANSWER_IS_NO
