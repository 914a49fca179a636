"""The verbs for clusters: cluster profiles, ssh hosts, and checks that jobs can run.

Imports inside a verb keep `--help` and completion fast: a verb loads what it uses.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from gptctl.cli.options import NumberRange, as_json_option, complete_cluster, examples, trust_option
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.remote.connection import JumpHosts, ShownKey
    from gptctl.remote.route import Route


@click.group(epilog=examples("gptctl clusters list", "gptctl clusters check local"))
def clusters() -> None:
    """List, show and check cluster profiles."""


@clusters.command("list", epilog=examples("gptctl clusters list", "gptctl clusters list --json"))
@as_json_option
def list_clusters(as_json: bool) -> None:
    """List the cluster profiles that gptctl finds.

    It looks in ./clusters, in your config folder, and at the bundled ones.
    """
    from gptctl.cli import ui
    from gptctl.spec.cluster import known_profiles, load_profile
    from trainer.errors import errors_in

    rows = []
    for name, file in known_profiles().items():
        # Load by path: by name, every folder would be searched again for each profile.
        # One broken file must not hide the other profiles.
        try:
            profile = load_profile(str(file))
            kind = "invalid" if errors_in(profile.findings) else profile.cluster.kind
        except UserError:  # not even a file
            kind = "invalid"
        rows.append({"cluster": name, "kind": kind, "file": str(file)})
    if as_json:
        ui.print_json(rows)
    else:
        cells = [list(row.values()) for row in rows]
        ui.print_table("clusters", ["cluster", "kind", "file"], cells)


@clusters.command(
    "show", epilog=examples("gptctl clusters show local", "gptctl clusters show a800 --json")
)
@click.argument("name", shell_complete=complete_cluster)
@as_json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show every value of a cluster profile, and the line that sets it."""
    from gptctl.cli import ui
    from gptctl.cli.table_layout import Column
    from gptctl.spec.cluster import load_profile
    from gptctl.text import plain_value

    profile = load_profile(name)
    values, written = asdict(profile.cluster), profile.reading.values
    # To stderr: stdout stays valid JSON. An invalid profile is still shown, to help fix it.
    ui.print_findings(profile.findings, to_stderr=True)
    places = {key: str(place) for key, place in profile.reading.places.items() if key in written}
    if as_json:
        ui.print_json({"values": values, "origins": places})
        return
    # A profile is one file: naming it once leaves room for the values.
    file = next((place.rpartition(":")[0] for place in places.values()), "")
    lines = {key: f"line {place.removeprefix(f'{file}:')}" for key, place in places.items()}
    cells = [[key, plain_value(value), lines.get(key, "default")] for key, value in values.items()]
    columns = [Column("key"), Column("value", "wrap"), Column("from")]
    ui.print_table(f"cluster {profile.cluster.name}: {file}", columns, cells)


@clusters.command(
    "check",
    epilog=examples("gptctl clusters check local", "gptctl clusters check clusters/a800.yaml"),
)
@click.argument("name", shell_complete=complete_cluster)
@as_json_option
def check_cluster(name: str, as_json: bool) -> int:
    """Check a cluster profile; for a local one, also check this machine.

    Exit code 0: valid; 1: invalid.
    """
    from gptctl.cli import ui
    from gptctl.jobs.preflight import check_profile
    from gptctl.jobs.submit import this_site
    from gptctl.spec.cluster import load_profile
    from gptctl.text import count
    from trainer.errors import errors_in

    profile = load_profile(name)
    # The file first, then what it refers to: paths and programs on this machine.
    findings = [*profile.findings, *check_profile(profile.cluster, this_site())]
    errors = len(errors_in(findings))
    if as_json:
        listed = [finding.as_json() for finding in findings]
        ui.print_json({"cluster": profile.cluster.name, "findings": listed})
    else:
        ui.print_findings(findings)
        verdict = "ready"
        # Only `doctor` connects to other machines; this check must be quick and work offline.
        if not profile.cluster.traits.is_one_machine:
            verdict = f"the profile is valid; check the cluster: gptctl doctor --cluster {name}"
        ui.print_text(f"{profile.cluster.name}: {count(errors, 'error') if errors else verdict}")
    return ANSWER_IS_NO if errors else 0


@click.command(
    epilog=examples("gptctl doctor --cluster a800", "gptctl doctor --cluster a800 --nodes 4 --json")
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Check this cluster profile: a name or a path.",
    shell_complete=complete_cluster,
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Check this many nodes; default: 2 on Slurm, all on ssh.",
)
@click.option(
    "--timeout",
    type=NumberRange(min=0),
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="On Slurm, wait this long for nodes.",
)
@trust_option
@as_json_option
def doctor(cluster: str, nodes: int | None, timeout: float, trust: bool, as_json: bool) -> int:
    """Check that a cluster can run jobs, and suggest fixes.

    A short Slurm job, or a script on ssh hosts, checks Python, torch, GPUs, network, clocks, the
    run folder, and the bandwidth between nodes. It leaves nothing behind.

    Exit code 0: no problem; 1: problems; 3: the cluster cannot be reached.
    """
    from gptctl.cli import ui
    from gptctl.doctor.examine import DoctorRequest, examine
    from gptctl.doctor.rows import merged, tally
    from gptctl.jobs.submit import this_site

    # `say` prints what is being checked to stderr: a Slurm job may take minutes to start.
    report = examine(DoctorRequest(cluster, nodes, timeout, this_site(), ui.say, trust))
    if as_json:
        ui.print_json([row.as_json() for row in report.rows])
        return report.exit_code
    # JSON has every row; a person reads one row for all nodes with the same answer.
    rows = merged(report.rows)
    cells = [[row.check, row.node, row.state, row.found] for row in rows]
    title = f"{report.cluster}: {tally(rows)}"
    ui.print_table(title, ["check", "node", "state", "found"], cells)
    # Exactly as they are: these lines are meant to be copied.
    for row in rows:
        if row.state == "ok" and row.fix:
            ui.print_exactly(f"{row.fix}\n")
    # Fixes are listed below the table: they are too long for a column.
    if to_do := [row for row in rows if row.state != "ok"]:
        named = [(f"{row.check}{f' ({row.node})' if row.node else ''}", row.fix) for row in to_do]
        ui.print_pairs("fixes", named)
    return report.exit_code


@click.group(epilog=examples("gptctl hosts trust lab", "gptctl hosts trust lab --yes"))
def hosts() -> None:
    """Manage the hosts that gptctl reaches by ssh."""


@hosts.command(epilog=examples("gptctl hosts trust lab", "gptctl hosts trust lab --json"))
@click.argument("cluster", shell_complete=complete_cluster)
@click.option("--yes", is_flag=True, help="Pin new keys without asking.")
@trust_option
@as_json_option
def trust(cluster: str, yes: bool, trust: bool, as_json: bool) -> int:
    """Show the host keys of a cluster's hosts, and pin new ones.

    Compare the fingerprints with those on the hosts themselves:
    ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub. A changed key is never pinned. --json never
    asks: it pins new keys only with --yes.
    """
    from gptctl.cli import ui
    from gptctl.remote.connection import JumpHosts

    rows: list[dict[str, str]] = []
    problems: list[UserError] = []
    # One connection to each jump host serves all hosts behind it.
    jump_hosts = JumpHosts()
    # Pin a jump host before the hosts behind it: they can only be reached through a trusted one.
    for routes in by_distance(routes_of(cluster, trust)):
        shown = ask_keys(routes, jump_hosts, problems)
        if shown and not as_json:
            cells = [list(row_of(key).values()) for key in shown]
            ui.print_table("host keys", ["host", "key", "state"], cells)
        rows += pin_new(shown, yes, as_json)
    # Problems come last: one unreachable host must not stop the others from being pinned.
    if as_json:
        ui.print_json({"keys": rows, "problems": [problem.message for problem in problems]})
    for problem in problems:
        ui.print_error(problem)
    # Raised after everything was printed: the user sees the state of all hosts.
    if changed := [row["host"] for row in rows if row["state"] == "changed"]:
        hint = (
            "this may be an attack; if you know why the key changed, delete its line from "
            "known_hosts and run this command again"
        )
        raise UserError(f"the key of {', '.join(changed)} has CHANGED", hint, ANSWER_IS_NO)
    return OUT_OF_REACH if problems else 0


def pin_new(shown: list[ShownKey], yes: bool, as_json: bool) -> list[dict[str, str]]:
    """Pin the new keys if the user agrees; return the rows of all keys."""
    from gptctl.cli import ui
    from gptctl.remote.known_hosts import pin
    from gptctl.text import count

    new = [key for key in shown if key.state == "new"]
    # With --json there may be nobody to ask: a question would block a program.
    is_agreed = bool(new) and (
        yes or (not as_json and agrees(f"pin {count(len(new), 'new key')}?"))
    )
    if new and not is_agreed and not as_json:
        hint = "compare the fingerprints, then run this command again"
        raise UserError("no key was pinned", hint)
    # Pin each key right away: hosts behind this one need it in the next round.
    for key in new if is_agreed else ():
        route = key.route
        text = f"{key.key.get_name()} {key.key.get_base64()}"
        pin(route.known_hosts, route.host, route.port, text)
        ui.say(f"pinned: {route.name}")
    return [
        {**row_of(key), "state": "pinned"} if is_agreed and key in new else row_of(key)
        for key in shown
    ]


def agrees(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    # Ctrl-C, or no stdin to read an answer from: a script needs --yes.
    except click.Abort:
        hint = "--yes pins new keys without asking"
        raise UserError("no answer", hint, WRONG_USAGE) from None


def row_of(shown: ShownKey) -> dict[str, str]:
    from gptctl.remote.connection import fingerprint

    # The SHA256 fingerprint, in the form that ssh-keygen prints: people compare the two.
    return {"host": shown.route.name, "key": fingerprint(shown.key), "state": shown.state}


def routes_of(cluster: str, trust: bool) -> list[Route]:
    from gptctl.remote.connection import routes
    from gptctl.spec.cluster import load_profile, profile_source
    from gptctl.spec.trust import settle_trust
    from trainer.errors import errors_in

    profile = load_profile(cluster)
    # Stop here: an invalid profile may name the wrong hosts.
    if errors_in(profile.findings):
        raise UserError(f"profile {cluster} is invalid", findings=profile.findings)
    if not profile.cluster.ssh_hosts:
        message = f"{cluster} is a cluster of kind {profile.cluster.kind}: it lists no hosts"
        hint = "give the name of an ssh cluster, or of one with a login host"
        raise UserError(message, hint, WRONG_USAGE)
    # Its hosts learn who the user is, and its known_hosts is written to.
    settle_trust([profile_source(profile, cluster, is_typed=True)], trust)
    return routes(profile.cluster)


def by_distance(routes: list[Route]) -> list[list[Route]]:
    """Group routes by the number of jump hosts before them; each host appears once."""
    rounds: list[dict[tuple[str, int], Route]] = []
    for route in routes:
        for depth, hop in enumerate((*route.jumps, route)):
            while len(rounds) <= depth:
                rounds.append({})
            # Hosts often share a jump host: keep the first route to it.
            rounds[depth].setdefault((hop.host, hop.port), hop._replace(jumps=route.jumps[:depth]))
    return [list(hops.values()) for hops in rounds]


def ask_keys(
    routes: list[Route], jump_hosts: JumpHosts, problems: list[UserError]
) -> list[ShownKey]:
    from gptctl.remote.connection import shown_key
    from gptctl.remote.parallel import in_parallel

    # A host that is down takes seconds to time out: ask all of them at once.
    answers = in_parallel(lambda route: shown_key(route, jump_hosts), routes)
    for answer in answers:
        # An unreachable host is expected and reported; any other exception is a bug.
        if isinstance(answer, UserError):
            problems.append(answer)
        elif isinstance(answer, Exception):
            raise answer
    return [answer for answer in answers if not isinstance(answer, Exception)]
