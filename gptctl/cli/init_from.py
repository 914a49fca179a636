"""`gptctl init --from`: a run config from the launch command of another program."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.file_reading import open_at_once
from gptctl.spec.check import check_config
from gptctl.spec.cluster import known_profiles, load_profile
from gptctl.spec.config_text import config_text
from gptctl.spec.foreign_commands import ForeignJob, translate_command
from gptctl.spec.launch_search import SCRIPT_ENDS
from gptctl.spec.shell_text import MAX_TEXT
from trainer.errors import WRONG_USAGE, Finding, UserError

# What a script may take from its surroundings and is the same for the job.
_VARIABLES = ("HOME", "USER", "PWD")
_OUTPUT = re.compile(r"\d*[<>|&]")  # a redirection, a pipe, or a final &
_WHERE = "run gptctl in the folder where the command runs, or write the path of the file"


class Translated(NamedTuple):
    """A config that is ready to be written, and the command that submits it."""

    text: str
    command: str
    job: ForeignJob
    findings: tuple[Finding, ...]

    def as_json(self, output: str) -> dict[str, Any]:
        keys = {override.key: override.value for override in self.job.overrides}
        unmapped = [each._asdict() for each in self.job.unmapped]
        return {"config": output, "command": self.command, "keys": keys, "unmapped": unmapped}


def translate(source: str, output: str) -> Translated:
    """Translate a command or the script in a file; raise UserError if it gives no valid config."""
    known = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    job = translate_command(_text_of(source), known, _text_of_called)
    if job.base and os.path.abspath(job.base) == os.path.abspath(output):
        hint = "write to another file with --output FILE"
        raise UserError(f"{output} is the config that the command names", hint, WRONG_USAGE)
    _require_base(job.base)
    checked = check_config(Path(job.base) if job.base else None, job.overrides)
    if not checked.is_valid:
        raise UserError("the command gives no valid run config", findings=checked.findings)
    # The options of Slurm wait for the profile that the command names.
    findings = [finding for finding in checked.findings if finding.code != "A013"]
    cluster = ["--cluster", _profile_with_queue()] if job.is_queued else []
    command = shlex.join(["gptctl", "submit", output, *cluster])
    text = config_text(job.overrides, _beside(job.base, output), list(_head(job)))
    return Translated(text, command, job, tuple(findings))


def _text_of(source: str) -> str:
    """The text itself, or that of the file of this name."""
    if not os.path.isfile(source):
        if os.path.exists(source):
            hint = "give the name of a file, or the command itself"
            raise UserError(f"{source} is not a regular file", hint, WRONG_USAGE)
        if len(source.split()) == 1 and (os.sep in source or source.endswith(SCRIPT_ENDS)):
            raise UserError(f"{source} does not exist", "check the path", WRONG_USAGE)
        return source
    try:
        with open(source, encoding="utf-8", opener=open_at_once) as file:
            return file.read(MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"cannot read {source}: {reason}", "", WRONG_USAGE) from None


def _text_of_called(path: str) -> str:
    """The text of a script that the command starts. It is read, never run."""
    if not os.path.exists(path):
        raise UserError(f"{path}, which the command starts, does not exist", _WHERE, WRONG_USAGE)
    return _text_of(path)


def _require_base(base: str) -> None:
    if base and not os.path.exists(base):
        message = f"{base}, which -c in the command names, does not exist"
        raise UserError(message, _WHERE, WRONG_USAGE)


def _beside(base: str, output: str) -> str:
    """The path of the base config as the written one must name it: from its own folder."""
    if not base or os.path.isabs(base):
        return base
    return os.path.relpath(base, os.path.dirname(os.path.abspath(output)))


def _profile_with_queue() -> str:
    """The only cluster profile that has a queue, or a word to be replaced."""
    found = [name for name in known_profiles() if not name.endswith("-example")]
    queued = [name for name in found if _has_queue(name)]
    return queued[0] if len(queued) == 1 else "NAME"


def _has_queue(name: str) -> bool:
    try:
        return load_profile(name).cluster.traits.has_queue
    except UserError:
        return False


def _head(job: ForeignJob) -> Iterator[str]:
    yield f"From a command that launches {job.program}, by `gptctl init --from`"
    # Only the names: a value may be long, or a secret. What became of the output has none.
    left = [each for each in job.unmapped if not each.is_set and not _OUTPUT.match(each.what)]
    names = dict.fromkeys(each.what.split()[0].partition("=")[0] for each in left)
    yield from _filled("not in this config:", list(names))


def _filled(first: str, words: Sequence[str]) -> Iterator[str]:
    line = first if words else ""
    for word in words:
        if len(line) + len(word) > 90:
            yield line
            line = " "
        line += f" {word}"
    if line:
        yield line
