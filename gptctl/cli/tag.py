"""The verb `tag`: tags and notes, by which jobs are found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.completers import complete_tag
from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.jobs.labels import Labels
    from gptctl.jobs.store import JobRecord


def complete_word(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    jobs = complete_job(context, parameter, incomplete)
    return [*jobs, *complete_tag(context, parameter, incomplete)]


@click.command(
    epilog=examples(
        "gptctl tag gpt-3f9a2c exp=lr --note 'twice the batch'",
        "gptctl tag gpt-3f9a2c gpt-77b010 --add baseline --remove draft",
        "gptctl tag gpt-3f9a2c --json",
    )
)
@click.argument(
    "words", nargs=-1, required=True, metavar="JOB… [K=V]…", shell_complete=complete_word
)
@click.option(
    "--add", "added", metavar="WORD", multiple=True, help="Add a tag without a value; repeatable."
)
@click.option(
    "--remove",
    "removed",
    metavar="KEY",
    multiple=True,
    shell_complete=complete_tag,
    help="Remove the tag with this key; repeatable.",
)
@click.option("--note", metavar="TEXT", help="Set the note; an empty text removes it.")
@as_json_option
@click.pass_obj
def tag(
    session: Session,
    words: tuple[str, ...],
    added: tuple[str, ...],
    removed: tuple[str, ...],
    note: str | None,
    as_json: bool,
) -> None:
    """Set, remove or show the tags and the note of jobs.

    Words with = are tags, the others are jobs. Without tags and options it shows what the jobs
    have. Jobs that `gptctl rm` removed keep their tags. `gptctl list --tag` finds jobs by them.
    """
    from gptctl.jobs.labels import LabelStore, parse_note, parse_tags

    tags = parse_tags([*(word for word in words if "=" in word), *added])
    keys = [key.partition("=")[0] for key in removed]
    if both := {each.key for each in tags}.intersection(keys):
        message = f"the tag {min(both)} would be both set and removed"
        raise UserError(message, "give only one of the two", WRONG_USAGE)
    text = parse_note(note) if note is not None else None
    # Find all jobs before changing one: after a typing error nothing is changed.
    records = find_all(session, [word for word in words if "=" not in word])
    labels = LabelStore()
    is_change = bool(tags or keys or text is not None)
    for record in records if is_change else ():
        labels.change(record, tags, keys, text)
    print_labels([(record, labels.of(record)) for record in records], as_json)


def find_all(session: Session, names: Sequence[str]) -> list[JobRecord]:
    if not names:
        hint = "name one: gptctl tag JOB key=value"
        raise UserError("no job is named; words with = are tags", hint, WRONG_USAGE)
    found = {}
    for name in names:
        try:
            record = session.find(name)
        except UserError as error:
            hint = f"{error.hint}; a tag without a value is added with --add {name}"
            raise UserError(error.message, hint, error.exit_code) from None
        found[record.id] = record
    return list(found.values())


def print_labels(jobs: Sequence[tuple[JobRecord, Labels]], as_json: bool) -> None:
    from gptctl.cli import ui
    from gptctl.jobs.labels import tags_text
    from gptctl.text import count

    if as_json:
        rows: list[dict[str, Any]] = [
            {"job": record.id, **labels.as_json()} for record, labels in jobs
        ]
        ui.print_json(rows)
        return
    columns = [Column("job"), Column("tags", "wrap"), Column("note", "wrap")]
    cells = [[record.id, tags_text(labels.tags), labels.note] for record, labels in jobs]
    ui.print_table(count(len(jobs), "job"), columns, cells)
