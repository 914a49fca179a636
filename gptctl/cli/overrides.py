"""Turn what was typed into overrides of a config, and check the config with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import WRONG_USAGE, UserError, in_order

if TYPE_CHECKING:
    from gptctl.cli.session import Session
    from gptctl.spec.check import Checked
    from trainer.config import Override

# Each of these flags sets a key of Launch, so it is checked and recorded like the config's own.
# Options that gptctl does not interpret go to `slurm.extra`, and from there to sbatch unchanged.
FLAGS = {
    "nodes": "nodes",
    "gpus_per_node": "gpus_per_node",
    "cluster": "cluster",
    "devices": "devices",
    "name": "job_name",
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "nodelist": "slurm.extra.nodelist",
    "exclude": "slurm.extra.exclude",
    "qos": "slurm.extra.qos",
    "constraint": "slurm.extra.constraint",
    "mem": "slurm.extra.mem",
    "reservation": "slurm.extra.reservation",
    "comment": "slurm.extra.comment",
    "requeue": "slurm.requeue",
    "log_dir": "log_dir",
    "style": "style",
    "max_restarts": "max_restarts",
}


def typed_overrides(
    flags: dict[str, str | bool | None],
    overrides: tuple[str, ...],
    variables: tuple[str, ...] = (),
    script: Sequence[str] = (),
    sbatch_options: tuple[str, ...] = (),
) -> list[Override]:
    """Turn what was typed into overrides of the config; report every mistake at once."""
    from gptctl.spec.program_words import ProgramWords, read_program
    from trainer.config import Override

    # Collect the mistakes instead of stopping at the first one.
    wrong: list[UserError] = []
    typed: list[Override] = []

    def add(read: Callable[[str], Override], texts: Sequence[str]) -> None:
        for text in texts:
            try:
                typed.append(read(text))
            except UserError as error:
                wrong.append(error)

    program = ProgramWords()
    try:
        program = read_program(script)
    except UserError as error:
        wrong.append(error)
    # Later overrides win: -o beats what was typed after --, and a flag beats -o.
    typed += program.keys
    add(Override.parse, overrides)
    # --devices beats gpus_per_node of the config: an empty value makes it follow from the list.
    if flags.get("devices") and not flags.get("gpus_per_node"):
        typed.append(Override("Launch.gpus_per_node", "", f"--devices {flags['devices']}"))
    given = [name for name, value in flags.items() if value is not None]
    add(lambda name: _flag_override(name, flags[name]), given)
    add(_variable_override, variables)
    add(_sbatch_override, sbatch_options)
    typed += program.entry
    # Equal hints are shown once; dict keeps their order.
    if wrong:
        hints = dict.fromkeys(error.hint for error in wrong if error.hint)
        message = "; ".join(error.message for error in wrong)
        raise UserError(message, "; ".join(hints), WRONG_USAGE)
    return typed


def _flag_override(name: str, value: str | bool | None) -> Override:
    from trainer.config import Override

    key, flag = f"Launch.{FLAGS[name]}", f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return Override(key, str(value), flag if value else f"--no-{name}")
    # An empty value is probably an unset shell variable: it must not change the layout silently.
    if not value or not value.strip():
        raise UserError(f"{flag} is empty", "write a value, or omit the flag", WRONG_USAGE)
    # sbatch parses these values itself: do not read them as YAML.
    is_verbatim = key.startswith("Launch.slurm.extra.")
    return Override(key, value, f"{flag} {value}", verbatim=is_verbatim)


def _variable_override(text: str) -> Override:
    from trainer.config import Override

    name, equals, value = text.partition("=")
    # A name that a shell cannot set would be lost on the way to the ranks.
    if not equals or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        hint = "write NAME=VALUE; use letters, digits and _ in NAME"
        raise UserError(f"--env {text[:200]}: invalid variable", hint, WRONG_USAGE)
    return Override(f"Launch.env.{name}", value, f"--env {name}", verbatim=True)


def _sbatch_override(text: str) -> Override:
    from trainer.config import Override

    name, _, value = text.partition("=")
    if not re.fullmatch("[a-z][a-z0-9-]*", name):
        hint = "write the long name of the option without dashes, such as qos=high"
        raise UserError(f"--sbatch {text[:200]}: invalid option name", hint, WRONG_USAGE)
    return Override(f"Launch.slurm.extra.{name}", value, f"--sbatch {name}", verbatim=True)


def one_config(*named: str | None) -> str | None:
    """Return the config that was named, by CONFIG, by -c or in another way."""
    given = [each for each in named if each]
    if len(given) > 1:
        message = f"config given twice: {given[0]} and {given[1]}"
        raise UserError(message, "give only one", WRONG_USAGE)
    return next(iter(given), None)


def check_arguments(
    config: str | None,
    config_option: str | None,
    nodes: str | None,
    gpus_per_node: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
) -> Checked:
    from gptctl.spec.check import check_config, find_config

    named = one_config(config, config_option)
    flags: dict[str, str | bool | None] = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "cluster": cluster,
    }
    return check_config(find_config(named), typed_overrides(flags, overrides))


def launch_overrides(
    session: Session,
    overrides: tuple[str, ...],
    variables: tuple[str, ...],
    script: tuple[str, ...],
    sbatch_options: tuple[str, ...],
    after: tuple[str, ...],
    **flags: str | bool | None,
) -> list[Override]:
    """Turn everything that was typed for a job into overrides of its config."""
    from gptctl.cli.dependencies import unmet, with_dependencies

    if after:
        sbatch_options = with_dependencies(sbatch_options, unmet(after, session))
    return typed_overrides(flags, overrides, variables, script, sbatch_options)


def check_job(
    session: Session,
    config: str | None,
    config_option: str | None,
    after: tuple[str, ...],
    more: Sequence[Override] = (),
    **typed: Any,
) -> tuple[Checked, list[Override]]:
    """Check the config of a job; return it with the overrides for its trainer.

    `more` overrides come from gptctl itself.
    """
    from gptctl.cli.dependencies import refuse_foreign
    from gptctl.spec.check import check_config, find_config
    from gptctl.spec.program_words import read_program

    overrides = launch_overrides(session, after=after, **typed)
    program = read_program(typed["script"])
    named = one_config(config, config_option, program.config)
    # A script and flags need no config; config.yaml in this folder may have nothing to do with it.
    path = None if program.needs_no_config and not named else find_config(named)
    checked = check_config(path, [*overrides, *more])
    checked = checked._replace(findings=in_order([*checked.findings, *program.notices]))
    # The cluster is known only now: the config may name it.
    refuse_foreign(session, after, checked)
    # The trainer gets its own arguments and `-o`: flags set keys of Launch, which it does not read.
    return checked, [*program.keys, *typed_overrides({}, typed["overrides"]), *more]
