"""What verbs share: config and job arguments, their completion, and the layout of help pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gptctl.cli.completers import complete_style
from trainer.errors import WRONG_USAGE, UserError, in_order

if TYPE_CHECKING:
    from gptctl.cli.session import Session
    from gptctl.spec.check import Checked
    from trainer.config import Override

F = TypeVar("F", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """Format the examples that end a help page."""
    # \b stops click from joining the lines into one paragraph.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def complete_override(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    # Completers import late: pressing Tab must answer at once.
    from gptctl.spec.summary import key_rows

    return [f"{row['key']}=" for row in key_rows(incomplete)]


def complete_cluster(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from gptctl.spec.cluster import known_profiles

    return [name for name in known_profiles() if name.startswith(incomplete)]


def complete_template(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from gptctl.spec.resources import named_files

    return [name for name in named_files("templates/configs") if name.startswith(incomplete)]


def complete_job(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from gptctl.jobs.store import Store

    return [job_id for job_id in Store().ids() if job_id.startswith(incomplete)]


def job_argument(required: bool) -> Callable[[F], F]:
    return click.argument("job", required=required, shell_complete=complete_job)


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
follow_option = click.option(
    "-f", "--follow", is_flag=True, help="Follow the logs; exit with the job's status."
)
wait_option = click.option(
    "--wait",
    "wait_for_it",
    is_flag=True,
    help="Wait until the job ends; exit with the job's status.",
)
queue_option = click.option(
    "--queue", is_flag=True, help="Wait until the machines are free, instead of starting at once."
)
override_option = click.option(
    "-o",
    "--override",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a config key; repeatable.",
    shell_complete=complete_override,
)
cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    help="Use this cluster profile: a name or a path.",
    shell_complete=complete_cluster,
)


class OptionWithAliases(click.Option):
    """An option that torchrun has under other names: help pages show the first one only."""

    def __init__(self, names: Sequence[str], **attributes: Any) -> None:
        # The parameter is called after the first name, not after the longest.
        first = names[0].lstrip("-").replace("-", "_")
        super().__init__([*names, first], **attributes)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy(self)
        shown.opts = self.opts[:1]
        return click.Option.get_help_record(shown, ctx)


def layout_options(verb: F) -> F:
    """Add the options that set the layout and the cluster of a job."""
    # Decorators apply from the bottom up: the last one here comes first on the help page.
    for option in (
        override_option,
        cluster_option,
        click.option(
            "--gpus-per-node",
            *("--nproc-per-node", "--nproc_per_node"),
            cls=OptionWithAliases,
            metavar="G",
            help="Set the number of ranks per node.",
        ),
        click.option(
            *("--nodes", "--nnodes"),
            cls=OptionWithAliases,
            metavar="N",
            help="Set the number of nodes, or MIN:MAX.",
        ),
    ):
        verb = option(verb)
    return verb


def config_options(verb: F) -> F:
    """Add CONFIG and the options that set its layout and cluster."""
    for option in (
        layout_options,
        click.option("-c", "--config", "config_option", metavar="CONFIG", help="Same as CONFIG."),
        click.argument("config", required=False, type=click.Path()),
    ):
        verb = option(verb)
    return verb


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

# The sections of the help pages of submit, render and rerun, most used options first.
# A verb shows those of these options that it has.
SECTIONS = {
    "Layout": ("nodes", "gpus_per_node", "cluster", "devices", "overrides"),
    "Job": (
        *("follow", "wait_for_it", "name", "time", "max_restarts", "resume", "queue", "after"),
        *("chain", "code", "parallel", "skip_invalid", "config_option"),
    ),
    "Run": ("dry_run", "variables", "log_dir", "style", "template", "node", "as_json"),
    "Slurm": (
        *("partition", "account", "qos", "constraint", "mem", "nodelist", "exclude"),
        *("reservation", "comment", "requeue", "sbatch_options"),
    ),
}


def launch_options(verb: F) -> F:
    """Add the options that all verbs that launch jobs share; `SECTIONS` orders them."""
    # The values stay text here: config rules check them together, and report every mistake at once.
    for option in (
        click.option("--devices", "--gpus", metavar="0,1,…", help="Use these GPUs on every node."),
        click.option("--name", metavar="NAME", help="Set the name of the job."),
        click.option(
            "--time", metavar="T", help="Set a time limit: 90 (minutes), 12:00:00 or 1-12:00:00."
        ),
        click.option("--partition", metavar="P", help="Submit to this partition."),
        click.option("--account", metavar="A", help="Charge this account."),
        click.option("--nodelist", metavar="HOSTS", help="Use only these hosts."),
        click.option("--exclude", metavar="HOSTS", help="Do not use these hosts."),
        click.option("--qos", metavar="Q", help="Set the quality of service."),
        click.option("--constraint", metavar="C", help="Use only nodes with these features."),
        click.option("--mem", metavar="M", help="Request this memory per node, such as 200G."),
        click.option("--reservation", metavar="R", help="Use this reservation."),
        click.option("--comment", metavar="TEXT", help="Attach a comment."),
        click.option(
            "--sbatch",
            "sbatch_options",
            metavar="NAME=VALUE",
            multiple=True,
            help="Pass any other option to sbatch; repeatable.",
        ),
        click.option(
            "--after",
            metavar="JOB",
            multiple=True,
            help="Start after that job completes, ends (JOB:any) or fails (JOB:fail); repeatable.",
        ),
        click.option(
            "--requeue/--no-requeue",
            default=None,
            help="Requeue the job after preemption, a time limit or a node failure.",
        ),
        click.option(
            "--log-dir", "--log_dir", metavar="DIR", help="Write the logs to this folder."
        ),
        click.option(
            "--env",
            "variables",
            metavar="K=V",
            multiple=True,
            help="Set an environment variable; repeatable.",
        ),
        click.option(
            "--style",
            metavar="STYLE",
            shell_complete=complete_style,
            help="Use standalone, c10d, static, launch; on Slurm also srun-script, sbatch, loop.",
        ),
        click.option("--max-restarts", metavar="K", help="Restart a failed job up to K times."),
        click.option(
            "--template", metavar="PATH", help="Use your own template, or a folder of templates."
        ),
    ):
        verb = option(verb)
    return verb


class LaunchCommand(click.Command):
    """A verb that launches jobs: options in sections; a program and its arguments after `--`."""

    refused: tuple[str, ...] = ()  # shared options that the verb does not take: not in its help

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        # Split here: click would take the words after -- for CONFIG.
        if "--" in args:
            at = args.index("--")
            args, words = args[:at], args[at + 1 :]
            if not words:
                raise click.UsageError("there is no script after --", context)
        typed = [] if words else list(args)
        try:
            rest = super().parse_args(context, args)
        except click.UsageError:
            # It may be about an option of a script that was typed without `--`.
            self.refuse_script(context, typed)
            raise
        if (context.params.get("config") or "").endswith(".py"):
            self.refuse_script(context, typed)
        context.params["script"] = tuple(words)
        return rest

    def refuse_script(self, context: click.Context, args: list[str]) -> None:
        """Raise UserError if these arguments contain a script where the config belongs."""
        from gptctl.spec.program_words import refuse_script

        refuse_script(f"gptctl {context.info_name}", args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        options = {
            param.name: param
            for param in self.get_params(context)
            if param.name not in self.refused
        }
        sections = [
            (section, [options[name] for name in names if name in options])
            for section, names in SECTIONS.items()
        ]
        shown = [(section, known) for section, known in sections if known]
        # Not in SECTIONS: click chooses the parameter's name, and changes it between versions.
        if help_option := self.get_help_option(context):
            next(known for section, known in shown if section == "Run").append(help_option)
        for section, known in shown:
            records = [record for option in known if (record := option.get_help_record(context))]
            with formatter.section(f"{section} options"):
                formatter.write_dl(records)


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
