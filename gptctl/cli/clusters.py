"""The verbs of cluster profiles."""

from __future__ import annotations

from dataclasses import asdict

import click

from gptctl.cli.options import as_json_option, complete_cluster, examples
from trainer.errors import ANSWER_IS_NO


@click.group(epilog=examples("gptctl clusters list", "gptctl clusters check local"))
def clusters() -> None:
    """Cluster profiles: where jobs can run."""


@clusters.command("list", epilog=examples("gptctl clusters list", "gptctl clusters list --json"))
@as_json_option
def list_clusters(as_json: bool) -> None:
    """List the profiles in ./clusters, in the user's config folder, and the bundled ones."""
    from gptctl.cli import ui
    from gptctl.spec.cluster import known_profiles, load_profile
    from trainer.errors import errors_in

    rows = []
    for name, file in known_profiles().items():
        profile = load_profile(str(file))
        kind = "cannot be used" if errors_in(profile.findings) else profile.cluster.kind
        rows.append({"cluster": name, "kind": kind, "file": str(file)})
    if as_json:
        ui.print_json(rows)
    else:
        ui.print_table(
            "clusters", ["cluster", "kind", "file"], [list(row.values()) for row in rows]
        )


@clusters.command(
    "show", epilog=examples("gptctl clusters show local", "gptctl clusters show a800 --json")
)
@click.argument("name", shell_complete=complete_cluster)
@as_json_option
def show_cluster(name: str, as_json: bool) -> None:
    """Show every value of a profile, with the line it was written in."""
    from gptctl.cli import ui
    from gptctl.spec.cluster import load_profile

    profile = load_profile(name)
    values = asdict(profile.cluster)
    ui.print_findings(profile.findings, to_stderr=True)
    places = {
        key: str(place)
        for key, place in profile.reading.places.items()
        if key in profile.reading.values
    }
    if as_json:
        ui.print_json({"values": values, "origins": places})
        return
    cells = [
        [key, "" if value is None else value, places.get(key, "default")]
        for key, value in values.items()
    ]
    ui.print_table(f"cluster {profile.cluster.name}", ["key", "value", "from"], cells)


@clusters.command(
    "check",
    epilog=examples("gptctl clusters check local", "gptctl clusters check clusters/a800.yaml"),
)
@click.argument("name", shell_complete=complete_cluster)
@as_json_option
def check_cluster(name: str, as_json: bool) -> int:
    """Check a profile, and on this machine that jobs can run. Exit code 0: nothing is wrong."""
    from gptctl.cli import ui
    from gptctl.jobs.preflight import check_profile
    from gptctl.jobs.submit import this_site
    from gptctl.spec.cluster import load_profile
    from gptctl.spec.summary import count
    from trainer.errors import errors_in

    profile = load_profile(name)
    findings = [*profile.findings, *check_profile(profile.cluster, this_site())]
    if as_json:
        ui.print_json(
            {
                "cluster": profile.cluster.name,
                "findings": [finding.as_json() for finding in findings],
            }
        )
    else:
        ui.print_findings(findings)
        wrong = len(errors_in(findings))
        sound = (
            "ready"
            if profile.cluster.kind == "local"
            else f"the profile is sound; gptctl doctor --cluster {name} looks at the cluster itself"
        )
        ui.print_text(f"{profile.cluster.name}: {count(wrong, 'error') if wrong else sound}")
    return ANSWER_IS_NO if errors_in(findings) else 0
