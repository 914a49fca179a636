"""The verbs that start an earlier job again: rerun and resume. They are one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import (
    F,
    LaunchCommand,
    as_json_option,
    examples,
    follow_option,
    job_argument,
    label_options,
    launch_options,
    layout_options,
    queue_option,
    trust_option,
    wait_option,
)
from gptctl.cli.overrides import launch_overrides
from gptctl.cli.session import Session
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.engine.launch_plan import StartConditions
    from gptctl.jobs.store import JobRecord
    from gptctl.spec.check import Checked
    from trainer.config import Override


def rerun_options(verb: F) -> F:
    for option in (
        as_json_option,
        wait_option,
        follow_option,
        trust_option,
        click.option("--dry-run", is_flag=True, help="Print what would run; start nothing."),
        click.option(
            "--code",
            type=click.Choice(["frozen", "now"]),
            default="frozen",
            help="Use the code that the job ran (default), or the code as it is now.",
        ),
        queue_option,
        label_options,
        launch_options,
        layout_options,
        job_argument(required=True),
    ):
        verb = option(verb)
    return verb


@click.command(
    cls=LaunchCommand,
    epilog=examples(
        "gptctl rerun gpt-3f9a2c --follow",
        "gptctl rerun gpt-3f9a2c --nodes 1 -o Engine.max_steps=2000 --dry-run",
        "gptctl rerun gpt-3f9a2c --code now -- train.py --batch_size 64",
    ),
)
@rerun_options
@click.option("--resume", is_flag=True, help="Continue from its newest checkpoint.")
@click.pass_obj
def rerun(session: Session, /, **arguments: Any) -> int:
    """Submit a job again from its saved files.

    The new job uses the same config, cluster profile and code, in its own run folder. Options and
    overrides replace values that were written for the first job; derived values are derived again.
    Words after `--` replace the arguments of its script, or the script itself.
    """
    return start_again(session, **arguments)


class ResumeCommand(LaunchCommand):
    program = "[-- FLAGS]"  # only the bundled trainer can resume


@click.command(
    cls=ResumeCommand,
    epilog=examples(
        "gptctl resume gpt-3f9a2c --follow", "gptctl resume gpt-3f9a2c -o Engine.max_steps=2000"
    ),
)
@rerun_options
@click.pass_obj
def resume(session: Session, /, **arguments: Any) -> int:
    """Continue a job from its newest checkpoint, as a new job.

    Same as `gptctl rerun JOB --resume`: the same config, layout, environment and code, unless
    options and overrides change them. It keeps the tags of the job. The job must have ended. Words
    after `--` are flags of the bundled trainer.
    """
    return start_again(session, resume=True, **arguments)


def start_again(
    session: Session,
    job: str,
    resume: bool,
    code: str,
    dry_run: bool,
    trust: bool,
    follow: bool,
    wait_for_it: bool,
    as_json: bool,
    template: str | None,
    queue: bool,
    script: tuple[str, ...],
    tags: tuple[str, ...],
    note: str | None,
    **arguments: Any,
) -> int:
    from gptctl.cli.dependencies import refuse_foreign, start_conditions
    from gptctl.cli.submit import (
        refuse_contradiction,
        show_dry_run,
        submit_and_follow,
        templates_of,
    )
    from gptctl.jobs.labels import NO_LABELS, LabelStore, Tag, parse_labels
    from gptctl.jobs.rerun import Changes, prepare_rerun
    from gptctl.spec.trust import settle_trust

    refuse_contradiction(dry_run, follow, wait_for_it)
    labels = parse_labels(tags, note)
    # Parse before searching for the job: a mistake in -o is reported without touching the store.
    typed = launch_overrides(session, script=(), **arguments)
    record = session.find(job)
    overrides = [*program_overrides(script, record), *typed]
    changes = Changes(overrides, resume, code == "now", templates_of(template, None))

    def conditions(checked: Checked) -> StartConditions:
        refuse_foreign(session, arguments["after"], checked)
        return start_conditions(session, checked, arguments["after"], queue)

    # A job that continues another one is the same run, so it has the same tags.
    kept = LabelStore().of(record) if resume else NO_LABELS
    labels = kept.changed([Tag(*each) for each in labels.tags.items()], note=labels.note)
    prepared = prepare_rerun(record, session.store, session.backends, changes, conditions)
    prepared = prepared._replace(labels=labels)
    if dry_run:
        show_dry_run(prepared, as_json, trust)
        return 0
    settle_trust(prepared.sources, trust)
    return submit_and_follow(session, prepared, as_json, follow, wait_for_it)


def program_overrides(words: tuple[str, ...], record: JobRecord) -> list[Override]:
    """What follows `--`: another program and its arguments, or new arguments for the job's own."""
    from gptctl.spec.program_words import read_program
    from trainer.config import Override
    from trainer.config.flags import parse_arguments

    if not words:
        return []
    if words[0].startswith("-m") or words[0].endswith(".py"):
        return read_program(words).overrides
    if not record.output_dir:
        return [Override("Launch.args", words, f"-- {words[0]}")]
    config, keys = parse_arguments(words)
    if config:
        hint = f"submit it: gptctl submit {config}"
        raise UserError(f"a rerun uses the config of {record.id}", hint, WRONG_USAGE)
    return keys
