"""The verbs: parse, call, print. Everything a verb needs is imported by the verb, so that `--help` stays fast."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from gptctl import __version__
from gptctl.cli.jobs import VERBS
from gptctl.cli.options import (
    INTERRUPTED,
    check_arguments,
    complete_template,
    config_options,
    examples,
)
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError, in_order

BUG = 70
READER_GONE = 141  # as a program that dies of SIGPIPE
MAX_LISTED = 1 << 17


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("gptctl init dp8", "gptctl validate config"),
)
@click.version_option(__version__, prog_name="gptctl")
def cli() -> None:
    """Turn one run config and a cluster profile into a distributed training job that starts right the first time."""


@cli.command(
    epilog=examples(
        "gptctl validate config",
        "gptctl validate run.yaml --nodes 2 --gpus-per-node 8 -o Distributed.mp_degree=2",
    )
)
@config_options
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option(
    "--resolved", is_flag=True, help="Print the complete config, with where every value came from."
)
@click.option("--json", "as_json", is_flag=True, help="Print a report for programs.")
def validate(strict: bool, resolved: bool, as_json: bool, **arguments: Any) -> int:
    """Check a run config and its layout, and report every mistake at once.

    CONFIG is a path or a bare name: `config` finds config.yaml, config.yml, configs.yaml or configs/config.yaml.
    Exit code 0: valid; 1: invalid; 2: wrong usage or an unreadable file.
    """
    from gptctl.cli import ui
    from gptctl.spec import summary as report

    checked = check_arguments(**arguments)
    starts = ""
    if checked.is_valid and checked.cluster.kind == "slurm":
        from gptctl.jobs.preflight import ask_scheduler
        from gptctl.jobs.submit import this_site

        refused, starts = ask_scheduler(checked, this_site())
        checked = checked._replace(findings=in_order([*checked.findings, *refused]))
    valid = checked.is_valid and not (
        strict and any(finding.level == "warning" for finding in checked.findings)
    )
    if as_json:
        scheduler = {"scheduler": starts} if starts else {}
        ui.print_json(
            {**report.as_json(checked, with_config=resolved), "valid": valid, **scheduler}
        )
    else:
        show_yaml = resolved and checked.is_valid
        ui.print_findings(checked.findings, to_stderr=show_yaml)
        if show_yaml:
            ui.print_text(report.resolved_yaml(checked))
        elif checked.is_valid:
            summary = [*report.summary(checked), *([("Slurm", starts)] if starts else [])]
            ui.print_pairs(f"{checked.name}: {report.verdict(checked, valid)}", summary)
            ui.say(report.assumptions())
        else:
            ui.print_text(f"{checked.name}: {report.verdict(checked, valid)}")
    return 0 if valid else ANSWER_IS_NO


@cli.command(
    epilog=examples(
        "gptctl topo config", "gptctl topo run.yaml --nodes 2 --gpus-per-node 8 --rank 3"
    )
)
@config_options
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--json", "as_json", is_flag=True, help="Print a list for programs.")
def topo(rank: int | None, as_json: bool, **arguments: Any) -> None:
    """Show where every rank runs: node, local rank, its coordinates and the members of its groups."""
    from gptctl.cli import ui
    from gptctl.spec import summary as report
    from trainer.layout import AXES

    checked = check_arguments(**arguments)
    if not checked.is_valid or checked.resolved is None:
        raise UserError(
            f"{checked.name} has no valid layout",
            findings=[f for f in checked.findings if f.level == "error"],
        )
    layout, machines = checked.resolved.layout, checked.machines
    if rank is not None and rank >= layout.world:
        raise UserError(f"there is no rank {rank}", f"use 0 to {layout.world - 1}", WRONG_USAGE)
    if rank is None and layout.world > MAX_LISTED:
        raise UserError(
            f"{layout.world:,} ranks are too many to list", "choose one with --rank", WRONG_USAGE
        )
    ranks = [rank] if rank is not None else range(layout.world)
    rows = list(report.topo_rows(layout, machines, ranks))
    if as_json:
        ui.print_json({"ranks": rows, "groups": report.topo_groups(layout, ranks)})
        return
    columns = ["node", "rank", "local", *AXES, *(f"{axis} group" for axis in reversed(AXES))]
    cells = [
        [row["node"], row["rank"], row["local_rank"], *(row[axis] for axis in AXES)]
        + [report.group_text(layout.group(axis, row["rank"])) for axis in reversed(AXES)]
        for row in rows
    ]
    title = f"{layout} = {layout.world} ranks, {machines.nodes} × {machines.per_node}"
    ui.print_table(title, columns, cells, by_first=True)


@cli.command(epilog=examples("gptctl init", "gptctl init dp2-mp2-pp2 --output run.yaml"))
@click.argument("name", required=False, shell_complete=complete_template)
@click.option(
    "--output", metavar="FILE", default="config.yaml", show_default=True, help="File to write."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--list", "list_them", is_flag=True, help="List the configs instead.")
@click.option("--json", "as_json", is_flag=True, help="With --list: for programs.")
def init(name: str | None, output: str, force: bool, list_them: bool, as_json: bool) -> None:
    """Write a commented run config to start from. Without NAME: char-gpt, which trains on any machine."""
    from gptctl.cli import ui
    from gptctl.spec.resources import choose, named_files

    configs = named_files("templates/configs")
    if list_them:
        about = {
            each: file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            for each, file in configs.items()
        }
        ui.print_json(about) if as_json else ui.print_pairs("gptctl init NAME", list(about.items()))
        return
    name = name or "char-gpt"
    text = choose("config", name, configs).read_text(encoding="utf-8")
    try:
        with open(output, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"{output} exists", "use --output FILE, or --force to overwrite it", WRONG_USAGE
        ) from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}", "", WRONG_USAGE) from None
    ui.print_text(output)
    ui.say(f"wrote {name}; next: gptctl validate {output}")


@cli.command(
    epilog=examples(
        "gptctl schema > gptctl.schema.json",
        "echo '# yaml-language-server: $schema=gptctl.schema.json' >> run.yaml",
    )
)
def schema() -> None:
    """Print the JSON Schema of run configs, for completion in editors."""
    from gptctl.cli import ui
    from gptctl.spec.launch import Launch
    from trainer.config.schema import run_schema

    ui.print_json(run_schema({"Launch": Launch}))


@cli.command(epilog=examples("gptctl keys Distributed", "gptctl keys Engine.save_load --json"))
@click.argument("prefix", default="")
@click.option("--json", "as_json", is_flag=True, help="Print a list for programs.")
def keys(prefix: str, as_json: bool) -> None:
    """List the keys of run configs with their defaults and meanings, all of them or those below PREFIX."""
    from gptctl.cli import ui
    from gptctl.spec import summary as report

    rows = report.key_rows(prefix)
    if not rows:
        raise UserError(f"no key starts with {prefix}", "`gptctl keys` lists them all", WRONG_USAGE)
    if as_json:
        ui.print_json(rows)
    else:
        ui.print_table(
            "keys of a run config",
            ["key", "default", "meaning"],
            [list(row.values()) for row in rows],
        )


@cli.command(epilog=examples("gptctl rules", "gptctl rules L001"))
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a list for programs.")
def rules(code: str | None, as_json: bool) -> None:
    """List the rules behind the codes of findings."""
    from gptctl.cli import ui
    from gptctl.spec.rules import all_rules

    chosen = [rule for rule in all_rules() if code is None or rule.code == code.upper()]
    if not chosen:
        raise UserError(f"there is no rule {code}", "`gptctl rules` lists them", WRONG_USAGE)
    if as_json:
        ui.print_json(
            [{"code": rule.code, "level": rule.level, "rule": rule.text} for rule in chosen]
        )
    else:
        ui.print_table(
            "rules",
            ["code", "level", "rule"],
            [[rule.code, rule.level, rule.text] for rule in chosen],
        )


@cli.command(
    epilog=examples(
        'eval "$(gptctl completion bash)"',
        "gptctl completion fish > ~/.config/fish/completions/gptctl.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "gptctl", "_GPTCTL_COMPLETE").source())


for verb in VERBS:
    cli.add_command(verb)


def main() -> None:
    """The entry point: the one place where exceptions become words and exit codes."""
    _make_streams_safe()
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone: nobody is left to tell
        code = READER_GONE
    except OSError as error:
        code = WRONG_USAGE
        with suppress(OSError):
            what = f"cannot use {error.filename}" if error.filename else "cannot write the answer"
            print(f"error: {what}: {error.strerror}", file=sys.stderr)
    _abandon_broken_streams()
    os._exit(code)  # taking modules apart would be a tenth of a short command's time


def _make_streams_safe() -> None:
    """A closed stream swallows what is written to it, and a terminal that knows no × gets an escape for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it lives as long as the process)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _abandon_broken_streams() -> None:
    """What a stream still holds and cannot write would end the interpreter with a code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run() -> int:
    try:
        code = cli(prog_name="gptctl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit:  # click's answer to a broken pipe
        return READER_GONE
    except click.ClickException as error:
        if "--json" not in sys.argv:
            error.show()
            return WRONG_USAGE
        return _report(UserError(error.format_message(), "see --help", WRONG_USAGE))
    except UserError as error:
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OSError:
        raise
    except Exception as error:
        return _report_bug(error)


def _report(error: UserError) -> int:
    from gptctl.cli import ui

    if "--json" in sys.argv:  # a program that asked for JSON gets JSON
        ui.print_json(error.as_json())
    else:
        ui.print_error(error)
    return error.exit_code


def _report_bug(error: Exception) -> int:
    if os.environ.get("GPTCTL_DEBUG"):
        raise error
    print(f"bug: {type(error).__name__}: {error}", file=sys.stderr)
    print("hint: please report it; GPTCTL_DEBUG=1 shows the traceback", file=sys.stderr)
    return BUG
