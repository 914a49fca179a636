"""The words of the command line of a program of the trainer, from what was typed for a verb."""

from __future__ import annotations

import os
from typing import Any


def option_words(**options: Any) -> list[str]:
    """The words of options for the program: `top_k=5` becomes `--top-k=5`, True a flag.

    One word, because a value may start with a dash.
    """
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for each in values:
            words += [flag] * bool(each) if isinstance(each, bool) else [f"{flag}={each}"]
    return words


def absolute(path: str) -> str:
    """A path for a program that may run in another folder."""
    return os.path.abspath(os.path.expanduser(path))


def tokenizer_path(source: str | None) -> str | None:
    """A path for a program that may run elsewhere, or a name, which is not a path."""
    return source if source in (None, "bytes", "none") else absolute(source)
