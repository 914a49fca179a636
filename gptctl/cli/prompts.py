"""What `generate` takes as words of the command line: prompts and stop words."""

from __future__ import annotations

from collections.abc import Sequence

from gptctl.spec.launch import LONGEST_ARGUMENT
from trainer.errors import WRONG_USAGE, UserError

MOST_BYTES = 100_000  # Linux allows 128 KiB for the script of a task, which contains all of them
FROM_FILE = "write prompts to a file: --prompts prompts.jsonl, with a `prompt` per line"


def check_prompts(prompts: Sequence[str], stops: Sequence[str]) -> None:
    """Raise UserError for texts that a command line cannot carry."""
    named = [*((f"prompt {number}", text) for number, text in enumerate(prompts, 1))]
    named += [("--stop", text) for text in stops]
    for name, text in named:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name} is not valid UTF-8", FROM_FILE, WRONG_USAGE) from None
        if len(text) > LONGEST_ARGUMENT:
            message = f"{name} has {len(text):,} characters, at most {LONGEST_ARGUMENT:,} fit here"
            raise UserError(message, FROM_FILE, WRONG_USAGE)
    total = sum(len(text.encode()) for _, text in named)
    if total > MOST_BYTES:
        message = f"the prompts have {total:,} bytes, at most {MOST_BYTES:,} fit here"
        raise UserError(message, FROM_FILE, WRONG_USAGE)
