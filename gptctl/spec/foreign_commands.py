"""Translate a launch command of another program into keys of a run config. Pure.

Understands Paddle's and torch's launchers, srun and sbatch, and behind them the flags of
PaddleNLP's GPT and of Megatron-LM. Any other script keeps its arguments. The command is text:
nothing of it is executed.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gptctl.spec.launch_search import (
    CONTAINERS,
    FORMS,
    FoundLaunch,
    find_called,
    find_launch,
    slurm_flags,
    some,
    words_of_slurm,
)
from gptctl.spec.launcher_flags import SWITCHES, map_launcher, map_slurm
from gptctl.spec.megatron_flags import is_megatron, map_megatron
from gptctl.spec.shell_text import ShellScript, is_known, read_script
from trainer.config import Override
from trainer.config.dialects import IGNORED
from trainer.config.flags import PADDLENLP_FLAGS, parse_arguments
from trainer.errors import WRONG_USAGE, UserError
from trainer.secret_names import looks_secret

_PADDLE_SCRIPT = re.compile(r"(.*/)?(run_pretrain\w*|tools/train)\.py")
_PREPARES = frozenset("module source . conda micromamba spack ml cd".split())
KEPT_SECRET = "not written into a config: use Launch.secrets"  # nosec B105  # a note for users
MAX_CALLS = 4  # scripts that start one another


class ForeignJob(NamedTuple):
    """What a launch command says, in our words."""

    program: str  # what the ranks run, as the command names it
    overrides: tuple[Override, ...]
    base: str = ""  # the config that the command names with -c
    unmapped: tuple[Unmapped, ...] = ()
    is_queued: bool = False  # the command has options of a scheduler


def translate_command(
    text: str, variables: Mapping[str, str], read_file: Callable[[str], str] | None = None
) -> ForeignJob:
    """Translate the text of a command or shell script; raise UserError if it launches nothing.

    `read_file` returns the text of a script that the command starts.
    """
    script, slurm, around = _launching_script(text, variables, read_file)
    launch, script = find_launch(script)
    wrapper = slurm_flags(words_of_slurm(launch.before))
    tasks, others = _tasks([*slurm, *wrapper], launch)
    parts = [map_slurm(others), _ranks_by_srun(tasks, bool(others), launch)]
    for_trainer = _dialect(launch.program) != "own"
    environment = {**around, **launch.command.environment}
    parts += [_environment(environment, for_trainer), _before(launch.before)]
    parts.append(_prepared_by(script))
    parts.append(map_launcher(list(split_flags(launch.launcher or (), SWITCHES))))
    so_far = [override for part in parts for override in part.overrides]
    try:
        mapped, base = _program(launch.program, _world(so_far), script)
    except UserError as error:
        raise UserError(script.shown(error.message), error.hint, error.exit_code) from None
    overrides = [*so_far, *mapped.overrides]
    unmapped = [each for part in (*parts, mapped) for each in part.unmapped]
    unmapped += _output(launch.command.output)
    return ForeignJob(
        launch.program[0],
        tuple(each._replace(source=script.shown(each.source)) for each in overrides),
        base,
        tuple(Unmapped(script.shown(each.what).strip() or "''", each.reason) for each in unmapped),
        bool(slurm or wrapper),
    )


def _launching_script(
    text: str, variables: Mapping[str, str], read_file: Callable[[str], str] | None
) -> tuple[ShellScript, list[Flag], Mapping[str, str]]:
    """The script with the launch command, all options of Slurm, and the variables around it.

    A command such as `sbatch --nodes 8 run.sh` names it; its options count more than the lines in
    the script.
    """
    script, slurm = _script_for_slurm(text, variables)
    around: dict[str, str] = {}
    for _ in range(MAX_CALLS):
        called = find_called(script) if read_file else None
        if not called or not read_file:
            break
        around |= called.environment
        known, outer = {**variables, **around}, [*slurm, *called.flags]
        inner = read_file(called.path)
        script, slurm = _script_for_slurm(inner, known, outer, called.arguments, script.unknown)
    return script, slurm, around


def _script_for_slurm(
    text: str,
    variables: Mapping[str, str],
    outer: Sequence[Flag] = (),
    arguments: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> tuple[ShellScript, list[Flag]]:
    """A script, and the options of Slurm: its own, then those of the command that starts it."""
    script = read_script(text, variables, arguments, unknown)
    slurm = [*slurm_flags(script.sbatch), *outer]
    # Scripts use what Slurm would set, such as --nnodes $SLURM_NNODES.
    known = {**variables, **_slurm_variables(slurm)}
    return read_script(text, known, arguments, unknown), slurm


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


def _tasks(flags: Sequence[Flag], launch: FoundLaunch) -> tuple[list[Flag], list[Flag]]:
    """The flags that set the number of ranks where srun starts them, and all others."""
    by_srun = launch.launcher is None
    tasks = [flag for flag in flags if by_srun and flag.name == "ntasks-per-node"]
    return tasks, [flag for flag in flags if flag not in tasks]


def _ranks_by_srun(tasks: Sequence[Flag], is_slurm: bool, launch: FoundLaunch) -> Mapped:
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
        elif looks_secret(name):
            mapped.unmapped.append(Unmapped(name, KEPT_SECRET))
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
        if os.path.basename(word) in CONTAINERS:
            text = " ".join(words[at:])
            mapped.unmapped.append(Unmapped(text, "set `container` in the cluster profile"))
            return mapped
    if words and not words_of_slurm(words):
        is_setup = words[0] in _PREPARES
        reason = "add it to `setup` of the cluster profile" if is_setup else NO_COUNTERPART
        mapped.unmapped.append(Unmapped(" ".join(words), reason))
    return mapped


def _output(words: Sequence[str]) -> Iterator[Unmapped]:
    """Name what the command does with its output: a job has log files, and runs by itself."""
    in_background = words[-1:] == ("&",)
    if sent := " ".join(words[:-1] if in_background else words):
        reads = sent.startswith("<")
        reason = NO_COUNTERPART if reads else "not needed: gptctl logs shows the output"
        yield Unmapped(sent, reason)
    if in_background:
        yield Unmapped("&", "not needed: the job runs in the background")


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
        raise UserError("the config of -c is known only when a shell runs", FORMS, WRONG_USAGE)
    return mapped, base or ""


def _own_program(words: tuple[str, ...], script: ShellScript) -> Mapped:
    words, secrets = _without_secrets(words)
    if unknown := list(_unknown(words, script)):
        message = f"{some(unknown)}: known only when a shell runs the command"
        hint = "write the values into the command, or into a copy of the script"
        raise UserError(message, hint, WRONG_USAGE)
    arguments = [Override("Launch.args", words[1:], words[0])] if words[1:] else []
    unmapped = [Unmapped(name, KEPT_SECRET) for name in secrets]
    return Mapped([set_key("Launch.entrypoint", words[0], words[0]), *arguments], unmapped)


def _without_secrets(words: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """The words without flags such as `--api-key=sk-1`, and the names of these flags."""
    kept, secrets, at = [words[0]], [], 1
    while at < len(words):
        name, equals, value = words[at].partition("=")
        follows = not equals and at + 1 < len(words) and not is_flag(words[at + 1])
        value = words[at + 1] if follows else value
        # A switch has no value to hide, and `--num-token 4` none either.
        if is_flag(name) and value and not value.isdigit() and looks_secret(name.lstrip("-")):
            secrets.append(name)
            at += 2 if follows else 1
        else:
            kept.append(words[at])
            at += 1
    return tuple(kept), secrets


def _unknown(words: Sequence[str], script: ShellScript) -> Iterator[str]:
    return (script.shown(word) for word in words if not is_known(word))
