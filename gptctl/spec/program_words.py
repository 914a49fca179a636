"""What the user typed after `--`: a script, `-m MODULE`, or arguments of the bundled trainer.

The trainer's arguments become config keys like any other: they are checked, derived from and
recorded with their origin. Looks at most for one file; everything else is pure.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence

from trainer.config import Override
from trainer.config.flags import PADDLENLP_FLAGS, parse_arguments
from trainer.errors import WRONG_USAGE, Finding, Rule, UserError
from trainer.named_tuple import NamedTuple

AS_TRAINER = Rule(
    "S020", "a missing run_pretrain.py with PaddleNLP's flags runs the bundled trainer", "notice"
)
# The scripts of FleetX's and PaddleNLP's tutorials, for which the bundled trainer can stand in.
# Any other missing script may be a misspelt one.
_PRETRAIN = re.compile(r"run_pretrain(_static)?\.py")


class ProgramWords(NamedTuple):
    """The words after `--`, as overrides of the config."""

    keys: tuple[Override, ...] = ()  # of the trainer's arguments; `-o` and flags override them
    entry: tuple[Override, ...] = ()  # Launch.entrypoint and Launch.args; nothing overrides them
    config: str | None = None  # -c of the trainer
    notices: tuple[Finding, ...] = ()

    @property
    def overrides(self) -> list[Override]:
        return [*self.keys, *self.entry]

    @property
    def needs_no_config(self) -> bool:
        """Whether it runs without a config: any script, and the trainer if it has arguments."""
        is_trainer = any(override.value == "trainer" for override in self.entry)
        return bool(self.keys) or (bool(self.entry) and not is_trainer)


def read_program(
    words: Sequence[str], is_file: Callable[[str], bool] = os.path.isfile
) -> ProgramWords:
    """Turn the words after `--` into overrides; no words give none."""
    if not words:
        return ProgramWords()
    if words[0] == "-m" or (words[0].startswith("-m") and not words[0].startswith("--")):
        return _module(words)
    if words[0].startswith("-"):
        hint = "give a script, or a module such as -m trainer, before its arguments"
        raise UserError(f"{words[0]} is not a script", hint, WRONG_USAGE)
    if _is_pretraining(words) and not is_file(words[0]):
        message = f"{words[0]} does not exist: the bundled trainer runs with its arguments"
        hint = f"for your own script, check the path of {words[0]}"
        notice = AS_TRAINER.found("Launch.entrypoint", words[0], message, hint)
        return _trainer(words[1:], words[0])._replace(notices=(notice,))
    return _own_program(words[0], words[1:], words[0])


def refuse_script(command: str, args: Sequence[str]) -> None:
    """Raise UserError if a script was typed without `--`, where a config belongs."""
    at = next((at for at, word in enumerate(args) if word.endswith(".py")), None)
    if at is not None:
        hint = f"did you mean `{command} {shlex.join([*args[:at], '--', *args[at:]])}`?"
        raise UserError(f"{args[at]} is a script, not a run config", hint, WRONG_USAGE)


def _module(words: Sequence[str]) -> ProgramWords:
    # `-mpkg.mod` in one word, as Python accepts it.
    name, rest = (words[0][2:], words[1:]) if words[0] != "-m" else ("".join(words[1:2]), words[2:])
    if not name:
        raise UserError("-m needs a module", "write -m MODULE, such as -m trainer", WRONG_USAGE)
    return _trainer(rest, "-m trainer") if name == "trainer" else _own_program(f"-m {name}", rest)


def _own_program(entrypoint: str, arguments: Sequence[str], typed: str = "") -> ProgramWords:
    source = f"-- {typed or entrypoint}"
    # `verbatim`: a script named `1e3` or `null` is a file name, not YAML.
    entry = Override("Launch.entrypoint", entrypoint, source, verbatim=True)
    return ProgramWords(entry=(entry, Override("Launch.args", tuple(arguments), source)))


def _trainer(arguments: Sequence[str], typed: str) -> ProgramWords:
    config, keys = parse_arguments(arguments)
    # The config may name a script; what was typed wins.
    return ProgramWords(tuple(keys), _own_program("trainer", (), typed).entry, config)


def _is_pretraining(words: Sequence[str]) -> bool:
    """Whether this is a tutorial's script, with arguments that the bundled trainer understands."""
    if not _PRETRAIN.fullmatch(os.path.basename(words[0])) or len(words) < 2:
        return False
    flags = [word for word in words[1:] if word.startswith("--")]
    names = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags}
    return names <= PADDLENLP_FLAGS | {"config", "override"}
