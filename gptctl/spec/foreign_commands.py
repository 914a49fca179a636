"""Translate a launch command of another program into keys of a run config. Pure.

Understands Paddle's and torch's launchers, srun and sbatch, and behind them the flags of
PaddleNLP's GPT and of Megatron-LM. Any other script keeps its arguments. The command is text:
nothing of it is executed.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from gptctl.spec.env_names import SET_FOR_EACH_PROCESS
from gptctl.spec.foreign_flags import (
    NO_COUNTERPART,
    NOT_KNOWN,
    Flag,
    Mapped,
    Unmapped,
    is_flag,
    set_key,
    split_flags,
)
from gptctl.spec.launcher_flags import (
    SBATCH_SWITCHES,
    SWITCHES,
    map_launcher,
    map_slurm,
    split_short,
)
from gptctl.spec.megatron_flags import is_megatron, map_megatron
from gptctl.spec.shell_text import (
    MAX_EXPANDED,
    ShellCommand,
    ShellScript,
    is_known,
    read_inside,
    read_script,
)
from trainer.config import Override
from trainer.config.dialects import IGNORED
from trainer.config.flags import PADDLENLP_FLAGS, parse_arguments
from trainer.errors import WRONG_USAGE, UserError

_LAUNCH_MODULES = frozenset(
    """
    torch.distributed.run torch.distributed.launch paddle.distributed.launch
    paddle.distributed.fleet.launch
    """.split()
)
_LAUNCH_FILE = re.compile(r"(.*/)?(torch|paddle)/distributed/(fleet/)?(launch|run)\.py")
_PYTHON = re.compile(r"python[0-9.]*")
_PADDLE_SCRIPT = re.compile(r"(.*/)?(run_pretrain\w*|tools/train)\.py")
# Before the program, these change nothing that a job would miss.
_TRANSPARENT = frozenset("env exec eval nohup time command unbuffer".split())
_PRINT = (("echo",), ("printf",), ("which",), ("type",))
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_CONTAINERS = frozenset("singularity apptainer docker podman enroot".split())
_PREPARES = frozenset("module source . conda micromamba spack ml cd".split())
_SECRET = re.compile(r"(?i).*(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL).*")
_FORMS = (
    "give a command with torchrun, python -m torch.distributed.run, python -m "
    "paddle.distributed.launch or python SCRIPT.py, or a shell script that contains one"
)
MAX_SHOWN = 80  # characters of a word in a message


class ForeignJob(NamedTuple):
    """What a launch command says, in our words."""

    program: str  # what the ranks run, as the command names it
    overrides: tuple[Override, ...]
    base: str = ""  # the config that the command names with -c
    unmapped: tuple[Unmapped, ...] = ()
    is_queued: bool = False  # the command has options of a scheduler


class _Launch(NamedTuple):
    """A command that starts training, cut into its parts."""

    command: ShellCommand
    before: tuple[str, ...]  # wrappers such as srun or singularity, with their options
    launcher: tuple[str, ...] | None  # flags of the launcher; None: python alone
    program: tuple[str, ...]  # a script or `-m MODULE` in the first word, then its arguments


def translate_command(text: str, variables: Mapping[str, str]) -> ForeignJob:
    """Translate the text of a command or shell script; raise UserError if it launches nothing."""
    script = read_script(text, variables)
    slurm = _slurm_flags(script.sbatch)
    # Scripts use what Slurm would set, such as --nnodes $SLURM_NNODES.
    script = read_script(text, {**variables, **_slurm_variables(slurm)})
    launch, script = _find_launch(script)
    wrapper = _slurm_flags(_of_slurm(launch.before))
    tasks, others = _tasks([*slurm, *wrapper], launch)
    parts = [map_slurm(others), _ranks_by_srun(tasks, bool(others), launch)]
    for_trainer = _dialect(launch.program) != "own"
    parts += [_environment(launch.command.environment, for_trainer), _before(launch.before)]
    parts.append(_prepared_by(script))
    parts.append(map_launcher(list(split_flags(launch.launcher or (), SWITCHES))))
    so_far = [override for part in parts for override in part.overrides]
    try:
        mapped, base = _program(launch.program, _world(so_far), script)
    except UserError as error:
        raise UserError(script.shown(error.message), error.hint, error.exit_code) from None
    overrides = [*so_far, *mapped.overrides]
    unmapped = [each for part in (*parts, mapped) for each in part.unmapped]
    return ForeignJob(
        launch.program[0],
        tuple(each._replace(source=script.shown(each.source)) for each in overrides),
        base,
        tuple(Unmapped(script.shown(each.what).strip() or "''", each.reason) for each in unmapped),
        bool(slurm or wrapper),
    )


def _slurm_flags(words: Sequence[str]) -> list[Flag]:
    flags = split_flags(split_short(words), SBATCH_SWITCHES)
    # `srun` itself, and what an option without a value seems to have as its value.
    return [flag._replace(values=flag.values[:1]) for flag in flags if flag.name]


def _of_slurm(words: Sequence[str]) -> list[str]:
    """The words of srun or sbatch, up to the container that they start."""
    if not words or os.path.basename(words[0]) not in ("srun", "sbatch", "salloc"):
        return []
    return list(takewhile(lambda word: os.path.basename(word) not in _CONTAINERS, words))


def _slurm_variables(flags: Sequence[Flag]) -> dict[str, str]:
    names = {
        "Launch.nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "Launch.gpus_per_node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
        "Launch.slurm.cpus_per_task": ("SLURM_CPUS_PER_TASK",),
    }
    return {
        name: str(override.value)
        for override in map_slurm(flags).overrides
        for name in names.get(override.key, ())
    }


def _find_launch(script: ShellScript) -> tuple[_Launch, ShellScript]:
    """The one command that starts training, and the script with what is unknown in it."""
    launches: list[_Launch] = []
    for command in script.commands:
        commands, script = _with_inner(command, script)
        launches += [launch for each in commands if (launch := _cut(each))]
    launches = [each for each in launches if each.launcher is not None] or launches
    if not launches:
        raise UserError("there is no launch command in this text", _FORMS, WRONG_USAGE)
    if len({_without_rank(launch) for launch in launches}) > 1:
        lines = _some([str(launch.command.line) for launch in launches])
        hint = "give one of them alone, or delete the others from a copy"
        raise UserError(f"several launch commands, in lines {lines}", hint, WRONG_USAGE)
    return launches[0], script


def _with_inner(
    command: ShellCommand, script: ShellScript
) -> tuple[list[ShellCommand], ShellScript]:
    """The command; for `bash -c TEXT` and `sbatch --wrap TEXT` the commands of the text."""
    words = command.words
    for at, word in enumerate(words):
        is_shell = at > 0 and os.path.basename(words[at - 1]) in ("bash", "sh")
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
            (*outer, *each.words), command.line, {**command.environment, **each.environment}
        )
        for each in inside.commands
    ]
    return commands, script._replace(unknown=inside.unknown)


def _without_rank(launch: _Launch) -> tuple[object, ...]:
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


def _cut(command: ShellCommand) -> _Launch | None:
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
) -> _Launch | None:
    while words and is_flag(words[0]) and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-X", "-W") else words[1:]
    if not words or words[0] == "-c":
        return None
    if words[0] == "-m":
        if len(words) > 1 and words[1] in _LAUNCH_MODULES:
            return _with_launcher(command, before, words[2:])
        is_tool = words[1:2] in ((), ("pip",), ("venv",))
        return None if is_tool else _Launch(command, before, None, (f"-m {words[1]}", *words[2:]))
    if _LAUNCH_FILE.fullmatch(words[0]):
        return _with_launcher(command, before, words[1:])
    return _Launch(command, before, None, words) if words[0].endswith(".py") else None


def _with_launcher(
    command: ShellCommand, before: tuple[str, ...], words: tuple[str, ...]
) -> _Launch | None:
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
    return _Launch(command, before, flags, (program, *words[at + 1 :]))


def _tasks(flags: Sequence[Flag], launch: _Launch) -> tuple[list[Flag], list[Flag]]:
    """The flags that set the number of ranks where srun starts them, and all others."""
    by_srun = launch.launcher is None
    tasks = [flag for flag in flags if by_srun and flag.name == "ntasks-per-node"]
    return tasks, [flag for flag in flags if flag not in tasks]


def _ranks_by_srun(tasks: Sequence[Flag], is_slurm: bool, launch: _Launch) -> Mapped:
    """Without a launcher, a task of srun is a rank; python alone is one rank."""
    mapped = Mapped([], [])
    if tasks:
        value, source = tasks[-1].value, tasks[-1].source
        mapped.overrides.append(set_key("Launch.gpus_per_node", value, source))
    elif launch.launcher is None and not is_slurm and not launch.before:
        mapped.overrides.append(set_key("Launch.gpus_per_node", "1", "python"))
    return mapped


def _environment(environment: Mapping[str, str], for_trainer: bool) -> Mapped:
    """Exported variables, except secrets and those that gptctl or Megatron need for themselves."""
    mapped = Mapped([], [])
    for name, value in environment.items():
        if name in SET_FOR_EACH_PROCESS or name.startswith(("GPTCTL_", "SLURM_", "SBATCH_")):
            mapped.unmapped.append(Unmapped(name, "not needed: set for each process"))
        elif name == "CUDA_DEVICE_MAX_CONNECTIONS" and for_trainer:
            # Megatron insists on 1; here it would only keep communication from overlapping.
            mapped.unmapped.append(Unmapped(f"{name}={value}", "not needed here"))
        elif _SECRET.fullmatch(name):
            reason = "not written into a config: use Launch.secrets"
            mapped.unmapped.append(Unmapped(name, reason))
        elif not is_known(value):
            mapped.unmapped.append(Unmapped(f"{name}={value}", NOT_KNOWN))
        elif name == "CUDA_VISIBLE_DEVICES":
            mapped.overrides.append(set_key("Launch.devices", value, f"{name}={value}"))
        else:
            source = f"export {name}={value}"
            mapped.overrides.append(set_key(f"Launch.env.{name}", value, source))
    return mapped


def _before(words: tuple[str, ...]) -> Mapped:
    """Name the wrappers that are not translated."""
    mapped = Mapped([], [])
    for at, word in enumerate(words):
        if os.path.basename(word) in _CONTAINERS:
            text = " ".join(words[at:])
            mapped.unmapped.append(Unmapped(text, "set `container` in the cluster profile"))
            return mapped
    if words and not _of_slurm(words):
        is_setup = words[0] in _PREPARES
        reason = "add it to `setup` of the cluster profile" if is_setup else NO_COUNTERPART
        mapped.unmapped.append(Unmapped(" ".join(words), reason))
    return mapped


def _prepared_by(script: ShellScript) -> Mapped:
    """Name the lines that prepare the environment of the ranks."""
    mapped = Mapped([], [])
    for command in script.commands:
        if command.words[0] in _PREPARES:
            is_cd = command.words[0] == "cd"
            reason = "start gptctl there" if is_cd else "add it to `setup` of the cluster profile"
            mapped.unmapped.append(Unmapped(" ".join(command.words), reason))
    return mapped


def _world(overrides: Sequence[Override]) -> int | None:
    """The number of GPUs, if nodes and ranks per node are known numbers."""
    last = {override.key: str(override.value) for override in overrides}
    devices = [each for each in last.get("Launch.devices", "").split(",") if each]
    per_node = last.get("Launch.gpus_per_node") or str(len(devices) or "")
    nodes = last.get("Launch.nodes", "1")
    is_number = all(re.fullmatch(r"[1-9][0-9]{0,6}", text) for text in (nodes, per_node))
    return int(nodes) * int(per_node) if is_number else None


def _dialect(words: Sequence[str]) -> str:
    if words[0] == "-m trainer" or _PADDLE_SCRIPT.fullmatch(words[0]):
        return "paddlenlp"
    is_ours = is_megatron(os.path.basename(words[0]), list(split_flags(words[1:])))
    return "megatron" if is_ours else "own"


def _program(words: tuple[str, ...], world: int | None, script: ShellScript) -> tuple[Mapped, str]:
    dialect = _dialect(words)
    if dialect == "paddlenlp":
        return _paddlenlp(words[1:])
    if dialect == "megatron":
        return map_megatron(list(split_flags(words[1:])), world), ""
    return _own_program(words, script), ""


def _paddlenlp(arguments: Sequence[str]) -> tuple[Mapped, str]:
    """The flags of PaddleNLP's GPT, and FleetX's -c and -o."""
    base, overrides = parse_arguments(arguments)
    mapped = Mapped([], [])
    for override in overrides:
        is_flat = override.source.startswith("--")
        if not is_known(str(override.value)):
            mapped.unmapped.append(Unmapped(override.source, NOT_KNOWN))
        elif override.key in IGNORED:
            mapped.unmapped.append(Unmapped(override.source, "only Paddle uses it"))
        elif is_flat and override.key not in PADDLENLP_FLAGS:
            mapped.unmapped.append(Unmapped(override.source, NO_COUNTERPART))
        else:
            mapped.overrides.append(override)
    if base and not is_known(base):
        raise UserError("the config of -c is known only when a shell runs", _FORMS, WRONG_USAGE)
    return mapped, base or ""


def _own_program(words: tuple[str, ...], script: ShellScript) -> Mapped:
    if unknown := list(_unknown(words, script)):
        message = f"{_some(unknown)}: known only when a shell runs the command"
        hint = "write the values into the command, or into a copy of the script"
        raise UserError(message, hint, WRONG_USAGE)
    arguments = [Override("Launch.args", words[1:], words[0])] if words[1:] else []
    return Mapped([set_key("Launch.entrypoint", words[0], words[0]), *arguments], [])


def _unknown(words: Sequence[str], script: ShellScript) -> Iterator[str]:
    return (script.shown(word) for word in words if not is_known(word))


def _some(words: Sequence[str]) -> str:
    """The first of some words, each once; a text may contain thousands of them."""
    found = [word[:MAX_SHOWN] for word in dict.fromkeys(words)]
    more = f" and {len(found) - 5} more" if found[5:] else ""
    return ", ".join(found[:5]) + more
