"""The verb that looks whether jobs would start right on a cluster."""

from __future__ import annotations

import click

from gptctl.cli.options import as_json_option, complete_cluster, examples


@click.command(
    epilog=examples("gptctl doctor --cluster a800", "gptctl doctor --cluster a800 --nodes 4 --json")
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Cluster profile, a name or a path.",
    shell_complete=complete_cluster,
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes to look at. Slurm: usually 2; ssh: all.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="Slurm: how long its job may wait for nodes.",
)
@as_json_option
def doctor(cluster: str, nodes: int | None, timeout: float, as_json: bool) -> int:
    """Look whether jobs would start right on a cluster, and say what to do where they would not.

    On Slurm a short job looks at the nodes, on ssh hosts a script: python, torch, GPUs, network, clocks, the folder of
    runs, and how fast the nodes talk. It leaves nothing behind. Exit code 0: nothing is wrong; 1: something is; 3: out
    of reach.
    """
    from gptctl.cli import ui
    from gptctl.doctor.examine import Visit, examine
    from gptctl.doctor.rows import merged, tally
    from gptctl.jobs.submit import this_site

    report = examine(Visit(cluster, nodes, timeout, this_site(), ui.say))
    if as_json:
        ui.print_json([row.as_json() for row in report.rows])
        return report.exit_code
    rows = merged(report.rows)
    cells = [[row.check, row.node, row.state, row.found] for row in rows]
    ui.print_table(f"{report.cluster}: {tally(rows)}", ["check", "node", "state", "found"], cells)
    if to_do := [row for row in rows if row.state != "ok"]:
        named = [(f"{row.check}{f' ({row.node})' if row.node else ''}", row.fix) for row in to_do]
        ui.print_pairs("what to do", named)
    return report.exit_code
