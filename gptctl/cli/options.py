"""What verbs share: config and job arguments, their completion, and the layout of help pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import click

from gptctl.cli.completers import complete_state, complete_style, complete_tag

F = TypeVar("F", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of numbers. click lets `nan` through: it is neither too small nor large."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        number = float(super().convert(value, parameter, context))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", parameter, context)
        return number


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
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Trust the files that this command refused to use, as they are now.",
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


def byte_size(text: str) -> int:
    """The type of options that take a number of bytes, such as 500MB, 2TB or 3GiB."""
    from gptctl.text import parse_size

    size = parse_size(text)
    if size is None:
        raise click.BadParameter(
            f"{text!r} is not a size; use a number of bytes such as 20GB, 1.5TB or 5000"
        )
    return size


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


def moment(text: str) -> float:
    """The type of options that take a time in the past: an age or a date."""
    import time

    from gptctl.moments import FORMS, moment_of

    now = time.time()
    found = moment_of(text, now)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a time; use {FORMS}")
    if found > now:
        raise click.BadParameter(f"{text!r} is in the future")
    return found


def filter_options(verb: F) -> F:
    """Add the options that choose among many jobs."""
    for option in (
        click.option(
            "--cluster",
            "clusters",
            metavar="NAME",
            multiple=True,
            shell_complete=complete_cluster,
            help="Only jobs on this cluster; repeatable.",
        ),
        click.option(
            "--tag",
            "tags",
            metavar="K=V",
            multiple=True,
            shell_complete=complete_tag,
            help="Only jobs with this tag, or with any value of a key; repeatable.",
        ),
        click.option(
            "--state",
            "states",
            metavar="STATE",
            multiple=True,
            shell_complete=complete_state,
            help="Only jobs in this state, such as FAILED; repeatable.",
        ),
    ):
        verb = option(verb)
    return verb


def label_options(verb: F) -> F:
    """Add the options that label a new job."""
    for option in (
        click.option("--note", metavar="TEXT", help="Attach a note to the job."),
        click.option(
            "--tag",
            "tags",
            metavar="K=V",
            multiple=True,
            shell_complete=complete_tag,
            help="Tag the job with key=value or a word; repeatable.",
        ),
    ):
        verb = option(verb)
    return verb


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


# The sections of the help pages of submit, render and rerun, most used options first.
# A verb shows those of these options that it has.
SECTIONS = {
    "Layout": ("nodes", "gpus_per_node", "cluster", "devices", "overrides"),
    "Job": (
        *("follow", "wait_for_it", "name", "tags", "note", "time", "max_restarts", "resume"),
        *("queue", "after", "chain", "code", "parallel", "skip_invalid", "config_option"),
    ),
    "Run": ("dry_run", "variables", "log_dir", "style", "template", "trust", "node", "as_json"),
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
    program = "[-- SCRIPT ARGS]"  # in the usage line: what may follow the options

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

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(context), self.program]

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
