"""INPUT… and the options that say how inputs are read, for the verbs for data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
INPUT = ("inputs", "input_format", "documents", "field", "invalid_utf8", "invalid_lines")


def input_options(verb: F) -> F:
    """Add INPUT… and the options that say how inputs are read."""
    for option in (
        click.option(
            "--invalid-lines",
            type=click.Choice(["refuse", "skip"]),
            default="refuse",
            show_default=True,
            help="What to do with JSON lines that have no text.",
        ),
        click.option(
            "--invalid-utf8",
            type=click.Choice(["replace", "refuse"]),
            default="replace",
            show_default=True,
            help="What to do with invalid UTF-8; replaced bytes are counted.",
        ),
        click.option(
            "--field",
            default="text",
            show_default=True,
            metavar="NAME",
            help="The field of JSON lines, or the column of parquet files, that has the text.",
        ),
        click.option(
            "--documents",
            type=click.Choice(["file", "line", "paragraph"]),
            default="file",
            show_default=True,
            help="What a document of a text file is; paragraphs are separated by blank lines.",
        ),
        click.option(
            "--format",
            "input_format",
            type=click.Choice(["text", "jsonl", "parquet"]),
            help="Read all inputs in this format. Default: by the name of each file.",
        ),
        click.argument("inputs", nargs=-1, required=True, metavar="INPUT..."),
    ):
        verb = option(verb)
    return verb
