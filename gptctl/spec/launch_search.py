"""Find the command in a shell text that starts training, and cut it into its parts. Pure."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from gptctl.spec.foreign_flags import Flag, is_flag, split_flags
from gptctl.spec.launcher_flags import SBATCH_SWITCHES, SWITCHES, split_short
from gptctl.spec.shell_text import (
    MAX_EXPANDED,
    ShellCommand,
    ShellScript,
    is_known,
    read_inside,
)
from trainer.errors import WRONG_USAGE, UserError

_LAUNCH_MODULES = frozenset(
    """
    torch.distributed.run torch.distributed.launch paddle.distributed.launch
    paddle.distributed.fleet.launch
    """.split()
)
_LAUNCH_FILE = re.compile(r"(.*/)?(torch|paddle)/distributed/(fleet/)?(launch|run)\.py")
_PYTHON = re.compile(r"python[0-9.]*")
_OTHER_LAUNCHERS = frozenset("deepspeed horovodrun colossalai".split())
_SHELLS = frozenset("bash sh dash zsh".split())
_SLURM = frozenset("sbatch srun salloc".split())
CONTAINERS = frozenset("singularity apptainer docker podman enroot".split())
SCRIPT_ENDS = (".sh", ".bash", ".sbatch", ".slurm")
# Before the program, these change nothing that a job would miss.
_TRANSPARENT = frozenset("env exec eval nohup time command unbuffer".split())
_PRINT = (("echo",), ("printf",), ("which",), ("type",))
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
FORMS = (
    "give a command with torchrun, python -m torch.distributed.run, python -m "
    "paddle.distributed.launch or python SCRIPT.py, or a shell script that contains one"
)
MAX_SHOWN = 80  # characters of a word in a message


class FoundLaunch(NamedTuple):
    """A command that starts training, cut into its parts."""

    command: ShellCommand
    before: tuple[str, ...]  # wrappers such as srun or singularity, with their options
    launcher: tuple[str, ...] | None  # flags of the launcher; None: python alone
    program: tuple[str, ...]  # a script or `-m MODULE` in the first word, then its arguments


def find_launch(script: ShellScript) -> tuple[FoundLaunch, ShellScript]:
    """The one command that starts training, and the script with what is unknown in it."""
    launches: list[FoundLaunch] = []
    for command in script.commands:
        commands, script = _with_inner(command, script)
        launches += [launch for each in commands if (launch := cut_launch(each))]
    launches = [each for each in launches if each.launcher is not None] or launches
    if not launches:
        raise _no_launch(script)
    if len({_without_rank(launch) for launch in launches}) > 1:
        lines = some([str(launch.command.line) for launch in launches])
        hint = "give one of them alone, or delete the others from a copy"
        raise UserError(f"several launch commands, in lines {lines}", hint, WRONG_USAGE)
    return launches[0], script


def _no_launch(script: ShellScript) -> UserError:
    for command in script.commands:
        for pair in zip(command.words, (*command.words[1:], ""), strict=True):
            name = os.path.basename(pair[0])
            if name in _OTHER_LAUNCHERS or (name, pair[1]) == ("accelerate", "launch"):
                message = f"line {command.line}: {name} is not a launcher that gptctl can translate"
                hint = "write the command with torchrun: torchrun --nproc_per_node N SCRIPT …"
                return UserError(message, hint, WRONG_USAGE)
    return UserError("there is no launch command in this text", FORMS, WRONG_USAGE)


def _with_inner(
    command: ShellCommand, script: ShellScript
) -> tuple[list[ShellCommand], ShellScript]:
    """The command; for `bash -c TEXT` and `sbatch --wrap TEXT` the commands of the text."""
    words = command.words
    for at, word in enumerate(words):
        is_shell = at > 0 and os.path.basename(words[at - 1]) in _SHELLS
        if word.startswith("--wrap="):
            return _inside(command, words[:at], word.partition("=")[2], script)
        if word == "--wrap" and at + 1 < len(words):
            return _inside(command, (*words[:at], *words[at + 2 :]), words[at + 1], script)
        if is_shell and re.fullmatch("-[a-z]*c", word) and at + 1 < len(words):
            return _inside(command, words[: at - 1], words[at + 1], script)
    return [command], script


def _inside(
    command: ShellCommand, outer: tuple[str, ...], text: str, script: ShellScript
) -> tuple[list[ShellCommand], ShellScript]:
    inside = read_inside(text, script)
    if len(inside.commands) * len(outer) > MAX_EXPANDED:
        message = f"line {command.line}: too many commands in one argument"
        raise UserError(message, "give only the launch command", WRONG_USAGE)
    commands = [
        ShellCommand(
            (*outer, *each.words),
            command.line,
            {**command.environment, **each.environment},
            (*each.output, *command.output),
        )
        for each in inside.commands
    ]
    return commands, script._replace(unknown=inside.unknown)


def _without_rank(launch: FoundLaunch) -> tuple[object, ...]:
    """The launch without the number of its node: tutorials show the command once per node."""
    flags = split_flags(launch.launcher or (), SWITCHES)
    kept = tuple(flag for flag in flags if flag.name not in ("node-rank", "rank"))
    return (kept, launch.program)


def _without_prefix(command: ShellCommand) -> ShellCommand:
    """The command without `exec`, `nohup`, `env A=1` and the like."""
    words, environment = command.words, dict(command.environment)
    while words and (words[0] in _TRANSPARENT or _ASSIGNED.match(words[0])):
        name, equals, value = words[0].partition("=")
        environment |= {name: value} if equals else {}
        words = words[1:]
    return command._replace(words=words, environment=environment)


def cut_launch(command: ShellCommand) -> FoundLaunch | None:
    """Cut a command into wrapper, launcher and program; None if it starts no training."""
    command = _without_prefix(command)
    words = command.words
    for at, word in enumerate(words if words[:1] not in _PRINT else ()):
        name = os.path.basename(word)
        if name in ("torchrun", "fleetrun"):
            return _with_launcher(command, words[:at], words[at + 1 :])
        is_python = _PYTHON.fullmatch(name) or (not is_known(word) and at == 0)
        if is_python and (launch := _python(command, words[:at], words[at + 1 :])):
            return launch
    return None


def _python(
    command: ShellCommand, before: tuple[str, ...], words: tuple[str, ...]
) -> FoundLaunch | None:
    while words and is_flag(words[0]) and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-X", "-W") else words[1:]
    if not words or words[0] == "-c":
        return None
    if words[0] == "-m":
        if len(words) > 1 and words[1] in _LAUNCH_MODULES:
            return _with_launcher(command, before, words[2:])
        is_tool = words[1:2] in ((), ("pip",), ("venv",))
        return (
            None if is_tool else FoundLaunch(command, before, None, (f"-m {words[1]}", *words[2:]))
        )
    if _LAUNCH_FILE.fullmatch(words[0]):
        return _with_launcher(command, before, words[1:])
    return FoundLaunch(command, before, None, words) if words[0].endswith(".py") else None


def _with_launcher(
    command: ShellCommand, before: tuple[str, ...], words: tuple[str, ...]
) -> FoundLaunch | None:
    at, is_module = 0, False
    while at < len(words) and is_flag(words[at]):
        name, equals, _ = words[at].lstrip("-").replace("_", "-").partition("=")
        is_module = is_module or name in ("m", "module")
        at += 1 if equals or name in SWITCHES else 2
    if at >= len(words):
        hint = "end it with the script and its arguments"
        raise UserError(f"line {command.line}: the launcher has no script", hint, WRONG_USAGE)
    flags = tuple(word for word in words[:at] if word not in ("-m", "--module"))
    program = f"-m {words[at]}" if is_module else words[at]
    return FoundLaunch(command, before, flags, (program, *words[at + 1 :]))


def some(words: Sequence[str]) -> str:
    """The first of some words, each once; a text may contain thousands of them."""
    found = [word[:MAX_SHOWN] for word in dict.fromkeys(words)]
    more = f" and {len(found) - 5} more" if found[5:] else ""
    return ", ".join(found[:5]) + more


class CalledScript(NamedTuple):
    """A script that a command starts, such as `sbatch --nodes 8 run.sh small`."""

    path: str
    arguments: tuple[str, ...]
    flags: tuple[Flag, ...]  # options of Slurm
    environment: Mapping[str, str]


def find_called(script: ShellScript) -> CalledScript | None:
    """The script that a text starts; None if the text launches training itself, or starts none."""
    called: list[CalledScript] = []
    for command in script.commands:
        inner, _ = _with_inner(command, script)
        if any(map(cut_launch, inner)):
            return None
        called += [found for each in inner if (found := _called_by(_without_prefix(each)))]
    paths = list(dict.fromkeys(each.path for each in called))
    if len(paths) > 1:
        hint = "give the one that launches the training"
        raise UserError(f"several scripts: {some(paths)}", hint, WRONG_USAGE)
    return called[0] if called else None


def _called_by(command: ShellCommand) -> CalledScript | None:
    words, at, runner = command.words, 0, ""
    while at < len(words) and (name := os.path.basename(words[at])) in _SLURM | _SHELLS:
        runner = name
        at = _after_options(words, at + 1, takes_values=name in _SLURM)
    # srun and a shell's own lines start programs too: only the name says that it is a script.
    is_script = at < len(words) and (
        words[at].endswith(SCRIPT_ENDS) or runner == "sbatch" or runner in _SHELLS
    )
    if not is_script or not is_known(words[at]):
        return None
    flags = slurm_flags(words_of_slurm(words[:at]))
    return CalledScript(words[at], words[at + 1 :], tuple(flags), command.environment)


def _after_options(words: Sequence[str], at: int, takes_values: bool) -> int:
    while at < len(words) and is_flag(words[at]):
        name, equals, _ = words[at].lstrip("-").partition("=")
        is_joined = not words[at].startswith("--") and len(words[at]) > 2  # -N2
        is_alone = equals or is_joined or name in SBATCH_SWITCHES or not takes_values
        # A switch that is not known here must not take the script as its value.
        is_alone = is_alone or "".join(words[at + 1 : at + 2]).endswith(SCRIPT_ENDS)
        at += 1 if is_alone else 2
    return at


def slurm_flags(words: Sequence[str]) -> list[Flag]:
    flags = split_flags(split_short(words), SBATCH_SWITCHES)
    # `srun` itself, and what an option without a value seems to have as its value.
    return [flag._replace(values=flag.values[:1]) for flag in flags if flag.name]


def words_of_slurm(words: Sequence[str]) -> list[str]:
    """The words of srun or sbatch, up to the container that they start."""
    if not words or os.path.basename(words[0]) not in _SLURM:
        return []
    return list(takewhile(lambda word: os.path.basename(word) not in CONTAINERS, words))
