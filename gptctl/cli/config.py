"""The verbs for run configs: check, explain and create them. They start nothing.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.completers import complete_key, complete_rule
from gptctl.cli.options import (
    as_json_option,
    complete_template,
    config_options,
    examples,
)
from gptctl.cli.overrides import check_arguments
from gptctl.cli.session import Session
from gptctl.cli.trusting import show_doubts
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError, in_order

if TYPE_CHECKING:
    from gptctl.spec.check import Checked
    from trainer.errors import Rule

MAX_LISTED = 1 << 17  # ranks; nobody reads a longer table, and it takes long to print


@click.command(
    epilog=examples(
        "gptctl validate config",
        "gptctl validate run.yaml --nodes 2 --gpus-per-node 8 -o Distributed.mp_degree=2",
        "gptctl validate config --resolved",
    )
)
@config_options
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--resolved", is_flag=True, help="Print every value and where it comes from.")
@as_json_option
@click.pass_obj
def validate(
    session: Session, /, strict: bool, resolved: bool, as_json: bool, **arguments: Any
) -> int:
    """Check a run config and its layout, and report every mistake.

    CONFIG is a path or a bare name: `config` finds config.yaml, config.yml, configs.yaml or
    configs/config.yaml. This command submits nothing. On a Slurm cluster it also asks Slurm
    whether it would accept the job. Data that `gptctl data prepare` wrote is compared with the
    config. Whether data, scripts and secrets exist is checked by submit.

    Exit code 0: valid; 1: invalid; 2: wrong usage or an unreadable file.
    """
    from gptctl.cli import ui
    from gptctl.spec import summary

    checked = check_arguments(**arguments)
    starts = ""
    if not checked.cluster.traits.has_queue:
        show_doubts(checked.sources, trust=False)
    # An invalid config has no job that Slurm could be asked about.
    if checked.is_valid and checked.cluster.traits.has_queue:
        from gptctl.jobs.submit import this_site
        from gptctl.spec.trust import doubts

        backend = session.backends.of(checked.cluster.kind)
        # It may ask through a login host that an untrusted profile names: that would run something.
        if found := doubts(checked.sources):
            ui.say(f"note: Slurm was not asked: {found[0]}; submit needs --trust")
        refused, starts = ([], "") if found else backend.expected_start(checked, this_site())
        checked = checked._replace(findings=in_order([*checked.findings, *refused]))
    if checked.launch.files:
        checked = _with_copied_files(checked)
    if checked.is_valid:
        checked = _with_data(checked)
    has_warnings = any(finding.level == "warning" for finding in checked.findings)
    # --strict changes the answer, not the level of a finding: a warning stays a warning.
    valid = checked.is_valid and not (strict and has_warnings)
    ui.note_machine_findings(checked)
    if as_json:
        answer = {**summary.as_json(checked, with_config=resolved), "valid": valid}
        ui.print_json({**answer, "scheduler": starts} if starts else answer)
    elif resolved and checked.is_valid:
        # Findings go to stderr here: stdout is YAML that can be used as a config.
        ui.print_findings(checked.findings, to_stderr=True)
        ui.print_text(summary.resolved_yaml(checked))
    else:
        ui.print_findings(checked.findings)
        _print_summary(checked, valid, starts)
    return 0 if valid else ANSWER_IS_NO


def _with_data(checked: Checked) -> Checked:
    """Add where prepared data, or the checkpoint to start from, does not fit the config."""
    from gptctl.spec.machine_rules import check_data_here

    found = [*checked.findings, *check_data_here(checked)]
    # Most configs start from nothing, and need none of what reads a checkpoint.
    if checked.resolved and checked.resolved.run.Engine.save_load.ckpt_dir:
        from gptctl.spec.start_checkpoint import check_start

        found += check_start(checked)
    return checked._replace(findings=in_order(found))


def _with_copied_files(checked: Checked) -> Checked:
    """Add what is listed in Launch.files and can never be copied: pipes, devices, too much."""
    from gptctl.jobs.preflight import check_copied_files
    from gptctl.jobs.submit import this_site

    files, run_root = checked.launch.files, checked.cluster.run_root
    found = check_copied_files(files, this_site(), run_root)
    placed = (finding.at(checked.place_of(finding.key)) for finding in found)
    return checked._replace(findings=in_order([*checked.findings, *placed]))


def _print_summary(checked: Checked, valid: bool, starts: str) -> None:
    from gptctl.cli import ui
    from gptctl.spec import summary

    title = f"{checked.name}: {summary.verdict(checked, valid)}"
    # An invalid config has no layout and no memory estimate.
    if not checked.is_valid or not checked.resolved:
        ui.print_text(title)
        return
    rows = summary.summary(checked)
    ui.print_pairs(title, [*rows, ("Slurm", starts)] if starts else rows)
    # Estimates are only as good as their assumptions. On stderr, since they are not an answer.
    ui.say_wrapped(summary.estimate_note(checked.resolved))


@click.command(
    epilog=examples(
        "gptctl topo config",
        "gptctl topo run.yaml --nodes 2 --gpus-per-node 8 --rank 3",
        "gptctl topo run.yaml --collectives",
    )
)
@config_options
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Show this rank only.")
@click.option(
    "--collectives",
    "show_collectives",
    is_flag=True,
    help="Show what rank R (default: 0) sends in an update, and the least that theory needs.",
)
@as_json_option
def topo(rank: int | None, show_collectives: bool, as_json: bool, **arguments: Any) -> None:
    """Show where every rank runs, and the members of its groups."""
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.spec import summary
    from trainer.layout import AXES

    checked = check_arguments(**arguments)
    if not checked.is_valid or checked.resolved is None:
        # Warnings would only distract: without a layout there is nothing else to show.
        errors = [finding for finding in checked.findings if finding.level == "error"]
        raise UserError(f"{checked.name} has no valid layout", findings=errors)
    layout, machines = checked.resolved.layout, checked.machines
    if rank is not None and rank >= layout.world:
        raise UserError(f"there is no rank {rank}", f"use 0 to {layout.world - 1}", WRONG_USAGE)
    if show_collectives:
        _show_collectives(checked, rank or 0, as_json)
        return
    if rank is None and layout.world > MAX_LISTED:
        message = f"too many ranks to list: {layout.world:,}"
        raise UserError(message, "choose one with --rank", WRONG_USAGE)
    ui.note_machine_findings(checked)
    ranks = [rank] if rank is not None else range(layout.world)
    # With --rank only that row is computed: the layout may have millions of ranks.
    rows = list(summary.topo_rows(layout, machines, ranks))
    if as_json:
        ui.print_json({"ranks": rows, "groups": summary.topo_groups(layout, ranks)})
        return
    # Groups from the innermost axis out: mp, whose ranks should share a node, comes first.
    # A narrow window shows the groups first. An axis of degree 1 has nothing to show.
    split = [axis for axis in AXES if getattr(layout, axis) > 1]
    columns = [
        Column("node"),
        Column("rank"),
        Column("local", importance=2),
        *(Column(axis, importance=1 if axis in split else 4) for axis in AXES),
        *(Column(f"{axis} group", importance=0 if axis in split else 3) for axis in reversed(AXES)),
    ]
    cells = [
        [row["node"], row["rank"], row["local_rank"], *(row[axis] for axis in AXES)]
        + [summary.group_text(layout.group(axis, row["rank"])) for axis in reversed(AXES)]
        for row in rows
    ]
    title = f"{layout} = {layout.world} ranks, {machines.nodes} × {machines.per_node}"
    ui.print_table(title, columns, cells, by_first=True)


def _show_collectives(checked: Checked, rank: int, as_json: bool) -> None:
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.spec import collective_rows
    from trainer.collectives import collectives
    from trainer.layout import UNKNOWN_VOCAB

    assert checked.resolved is not None
    layout = checked.resolved.layout
    rows = collectives(checked.resolved.run, layout, rank)
    if as_json:
        ui.print_json({"rank": rank, **collective_rows.as_json(rows)})
        return
    if not rows:
        ui.print_text("A single rank sends nothing.")
        return
    columns = [
        Column(name, "wrap" if name == "what" else "keep", 2 if name in ("dtype", "size") else 0)
        for name in collective_rows.COLUMNS
    ]
    title = f"Collectives of rank {rank} per update: {layout}"
    ui.print_table(title, columns, collective_rows.cells(rows), by_first=True)
    names = ["axis", "sent per update", "needed"]
    ui.print_table("Bytes that the rank sends", names, collective_rows.total_cells(rows))
    for reason in collective_rows.reasons(rows):
        ui.print_text(f"more than needed, {reason}")
    if not checked.resolved.run.Model.vocab_size:  # known only when the data is read
        ui.print_text(f"The sizes are those of a text with {UNKNOWN_VOCAB} different characters.")


@click.command(
    epilog=examples(
        "gptctl init",
        "gptctl init dp2-mp2-pp2 --output run.yaml",
        'gptctl init --from "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 …"',
    )
)
@click.argument("name", required=False, shell_complete=complete_template)
@click.option(
    "--output", metavar="FILE", default="config.yaml", show_default=True, help="File to write."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option(
    "--from",
    "source",
    metavar="COMMAND",
    help="Translate this launch command, or the script in this file. Nothing in it is executed.",
)
@click.option("--list", "list_them", is_flag=True, help="List the configs; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --list or --from: print JSON.")
def init(
    name: str | None,
    output: str,
    force: bool,
    source: str | None,
    list_them: bool,
    as_json: bool,
) -> None:
    """Write a commented run config to start from.

    Without NAME: char-gpt, which trains in about two minutes on two cores. With --from: the
    translation of a torchrun, paddle.distributed.launch, srun or sbatch command, with the flags of
    PaddleNLP's GPT or of Megatron-LM. gptctl also prints the command that submits the config.
    """
    from gptctl.cli import ui
    from gptctl.spec.resources import choose, named_files

    # The first comment line of each config is its description: there is no list to maintain.
    configs = named_files("templates/configs")
    if list_them:
        texts = {each: file.read_text(encoding="utf-8") for each, file in configs.items()}
        about = {each: text.splitlines()[0].lstrip("# ") for each, text in texts.items()}
        ui.print_json(about) if as_json else ui.print_pairs("gptctl init NAME", [*about.items()])
        return
    if source is not None:
        if name is not None:
            raise UserError("NAME and --from are both given", "give only one", WRONG_USAGE)
        _init_from(source, output, force, as_json)
        return
    name = name or "char-gpt"
    text = choose("config", name, configs).read_text(encoding="utf-8")
    _write_config(output, text, force)
    # Stdout gets the path only, for `$(gptctl init)`.
    ui.print_text(output)
    ui.say(f"wrote {name}; next: gptctl validate {output}")


def _init_from(source: str, output: str, force: bool, as_json: bool) -> None:
    """Translate a launch command, write the config, and name what has no counterpart."""
    from gptctl.cli import ui
    from gptctl.cli.init_from import translate

    translated = translate(source, output)
    _write_config(output, translated.text, force)
    if as_json:
        ui.print_json(translated.as_json(output))
        return
    ui.print_findings(translated.findings, to_stderr=True)
    for each in translated.job.unmapped:
        ui.say(f"{'note' if each.is_set else 'not translated'}: {each.what}: {each.reason}")
    ui.say(f"wrote {output}; submit it with:")
    ui.print_text(translated.command)


def _write_config(output: str, text: str, force: bool) -> None:
    try:
        # "x" fails if the file exists. A check beforehand could lose a race with another process.
        with open(output, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        hint = "use --output FILE, or --force to overwrite it"
        raise UserError(f"{output} already exists", hint, WRONG_USAGE) from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}", "", WRONG_USAGE) from None


@click.command(
    epilog=examples(
        "gptctl schema > gptctl.schema.json",
        "echo '# yaml-language-server: $schema=gptctl.schema.json' >> run.yaml",
    )
)
def schema() -> None:
    """Print the JSON Schema of run configs, for editors."""
    from gptctl.cli import ui
    from gptctl.spec.launch import Launch
    from trainer.config.schema import run_schema

    # For editors with a YAML language server, which complete keys and mark mistakes.
    # The trainer knows its own sections; Launch belongs to gptctl, and is added here.
    ui.print_json(run_schema({"Launch": Launch}))


@click.command(
    epilog=examples("gptctl keys", "gptctl keys mp_degree", "gptctl keys Engine.save_load --json")
)
@click.argument("prefix", default="", shell_complete=complete_key)
@as_json_option
def keys(prefix: str, as_json: bool) -> None:
    """List the keys of run configs, their defaults and meanings.

    PREFIX shows only keys of which a part starts with it: Distributed, mp_degree, save_load.
    """
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.spec.summary import key_rows

    # An unknown prefix is wrong usage: an empty table would look like an answer.
    rows = key_rows(prefix)
    if not rows:
        raise UserError(f"no such key: {prefix}", "`gptctl keys` lists them all", WRONG_USAGE)
    if as_json:
        ui.print_json(rows)
    else:
        cells = [list(row.values()) for row in rows]
        ui.print_table("keys of a run config", ["key", Column("default", "wrap"), "meaning"], cells)


@click.command(epilog=examples("gptctl rules", "gptctl rules L002", "gptctl rules --json"))
@click.argument("code", required=False, shell_complete=complete_rule)
@as_json_option
def rules(code: str | None, as_json: bool) -> None:
    """List the rules that findings refer to by code.

    With CODE: explain a rule, with an example that breaks it and the fix. With the start of a
    code, such as T02: list the rules whose code starts so.
    """
    from gptctl.cli import ui
    from gptctl.spec.rule_pages import rule_pages
    from gptctl.spec.rules import all_rules

    # Codes are upper case, but people type l002.
    chosen = [rule for rule in all_rules() if rule.code.startswith((code or "").upper())]
    is_one = code is not None and [rule.code for rule in chosen] == [code.upper()]
    if not chosen or code == "":
        raise UserError(f"there is no rule {code}", "`gptctl rules` lists them", WRONG_USAGE)
    if as_json:
        rows = [{"code": rule.code, "level": rule.level, "rule": rule.text} for rule in chosen]
        page = rule_pages()[chosen[0].code].as_json() if is_one else {}
        ui.print_json([{**row, **page} for row in rows])
    elif is_one:
        ui.print_text(explained(chosen[0]))
    else:
        cells = [[rule.code, rule.level, rule.text] for rule in chosen]
        ui.print_table("rules", ["code", "level", "rule"], cells)
        ui.say("gptctl rules CODE explains one of them")


def explained(rule: Rule) -> str:
    from textwrap import fill, indent

    from gptctl.spec.rule_pages import rule_pages

    page = rule_pages()[rule.code]
    parts = [f"{rule.code} ({rule.level}): {rule.text}", fill(page.meaning, 88)]
    for title, example in (("Wrong", page.wrong), ("Fixed", page.fixed)):
        if example:
            where = {"profile": " (cluster profile)", "sweep": " (sweep file)"}.get(
                example.document, ""
            )
            parts.append(f"{title}{where}:\n{indent(example.text, '    ')}")
    return "\n\n".join(parts)


@click.command(
    epilog=examples(
        'eval "$(gptctl completion bash)"',
        "gptctl completion fish > ~/.config/fish/completions/gptctl.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell completion script."""
    from click.shell_completion import get_completion_class

    # click has the scripts for these three shells; `click.Choice` allows no other.
    found = get_completion_class(shell)
    assert found is not None
    # The script calls gptctl with this variable set; click then answers instead of running a verb.
    root = context.find_root().command
    click.echo(found(root, {}, "gptctl", "_GPTCTL_COMPLETE").source())
