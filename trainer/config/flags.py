"""The command line of the trainer: a config, overrides, and PaddleNLP's flags, which set keys."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.config.dialects import IGNORED, RENAMED, SPECIAL
from trainer.config.layers import Override
from trainer.errors import WRONG_USAGE, UserError

# Flat names that are sections of a file: none of them is a flag.
_SECTIONS = "batch_size dataset mix_precision save_load quantization hydra".split()
# The flags of PaddleNLP's GPT and of its launcher (`--max_lr 0.00015 --use_amp true …`).
PADDLENLP_FLAGS = frozenset(
    name
    for name in (*RENAMED, *SPECIAL, *IGNORED)
    if name.islower() and "." not in name and name not in _SECTIONS
)


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, list[Override]]:
    """Parse the config path and the overrides. Flags apply before overrides, each in order."""
    # Not argparse: the flags are not declared here, and KEY=VALUE words may stand between them.
    path, overrides, flags, rest = None, [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in ("-c", "--config", "-o", "--override"):
            if not equals and not rest:
                raise UserError(f"{word} needs a value", "run python -m trainer --help")
            value = value if equals else rest.pop(0)
            if name in ("-c", "--config"):
                path = value
            else:
                overrides.append(Override.parse(value))
        elif word.startswith("--"):
            flags.append(word)
            if not equals and rest and _is_value(rest[0]):
                flags.append(rest.pop(0))
        elif equals and not word.startswith("-"):
            overrides.append(Override.parse(word, flag=""))
        else:
            raise UserError(
                f"{word} is neither a flag nor KEY=VALUE", "run python -m trainer --help"
            )
    return path, [*parse_flags(flags), *overrides]


def _is_value(word: str) -> bool:
    """Whether a word is the value of the flag before it, and not the next flag or override.

    Negative numbers and paths that contain `=` are values.
    """
    if word.startswith("-"):
        return word[1:2].isdecimal() or word[1:2] == "."
    return not re.match(r"[A-Za-z_][\w.]*=", word)


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
