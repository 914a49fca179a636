"""PaddleNLP-style flags (`--max_lr 0.00015 --use_amp true …`): each sets one config key."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.layers import Override
from trainer.errors import WRONG_USAGE, UserError


def parse_flags(arguments: Sequence[str]) -> list[Override]:
    """Parse `--name value`, `--name=value`, or `--name` alone for a boolean.

    Names are not checked here: reading the config reports unknown ones.
    """
    overrides = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or "." in name:
            raise UserError(
                f"{word} is not a flag", "write --name value, such as --mp_degree 2", WRONG_USAGE
            )
        source = word
        if not equals:
            value = "true"
            # One leading dash is a value, such as a negative number; two start the next flag.
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
                source = f"{word} {value}"
        overrides.append(Override(name.replace("-", "_"), value, source))
    return overrides
