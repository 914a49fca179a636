"""The story of one visit: the profile, the scheduler as it is seen from here, the folder, the nodes."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gptctl.backends.slurm.client import SlurmError
from gptctl.doctor import here, slurm_side
from gptctl.doctor.judge import Promised, judge_port
from gptctl.doctor.probe import Sightings, fill, folder_in, node_names, plan_probe, rows_of
from gptctl.doctor.rows import Row, is_wrong, of_finding, ok, wrong
from gptctl.doctor.signals import interrupted_by_signals, undisturbed
from gptctl.doctor.slurm_job import run_on_nodes
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import read_json, read_text
from gptctl.planning.build import Site
from gptctl.spec.check import check_config
from gptctl.spec.cluster import Cluster, Profile, find_profile, load_profile, visible_gpus
from gptctl.text import count
from trainer.config import Override
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, Finding, UserError

if TYPE_CHECKING:
    from gptctl.doctor.ssh_hosts import Hosts

USUAL_NODES = 2


class Visit(NamedTuple):
    """What was asked for."""

    name: str  # of the cluster, or the path of its profile
    nodes: int | None
    timeout: float
    site: Site
    say: Callable[[str], None]


class Report(NamedTuple):
    cluster: str
    rows: list[Row]
    is_in_reach: bool = True

    @property
    def exit_code(self) -> int:
        if not self.is_in_reach:
            return OUT_OF_REACH
        return ANSWER_IS_NO if is_wrong(self.rows) else 0


def examine(visit: Visit) -> Report:
    profile = load_profile(visit.name)
    cluster = profile.cluster
    if cluster.kind == "local" and visit.nodes not in (None, 1):
        raise UserError("a local cluster is one machine", "leave out --nodes", WRONG_USAGE)
    rows = [*_profile_rows(visit.name, profile)]
    if is_wrong(rows):
        return Report(cluster.name, rows)
    with interrupted_by_signals():
        if cluster.kind == "slurm":
            return _on_slurm(visit, cluster, rows)
        if cluster.kind == "ssh":
            return _on_hosts(visit, cluster, rows)
        return Report(cluster.name, [*rows, *_on_this_machine(visit, cluster)])


def _profile_rows(name: str, profile: Profile) -> Iterator[Row]:
    """What `validate` would say of the profile, its environment too."""
    file = str(find_profile(name))
    found = list(profile.findings)
    if not any(finding.level == "error" for finding in found):
        checked = check_config(None, [Override("Launch.cluster", name, "--cluster", verbatim=True)])
        found += [each for each in checked.findings if each not in found and _is_about(each, file)]
    yield from map(of_finding, found)
    if not any(finding.level in ("error", "warning") for finding in found):
        yield ok("profile", file)


def _is_about(finding: Finding, file: str) -> bool:
    return finding.key == "Launch.cluster" or (
        finding.place is not None and finding.place.file == file
    )


@contextmanager
def _guarded(rows: list[Row], root: str) -> Iterator[None]:
    """A folder that cannot be used is a finding."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else root
        rows.append(
            wrong("run_root", f"{where}: {error.strerror}", "choose a folder that you may write to")
        )


def _on_this_machine(visit: Visit, cluster: Cluster) -> list[Row]:
    root = visit.site.absolute(cluster.run_root)
    rows: list[Row] = []
    with _guarded(rows, root), folder_in(Path(root)) as folder:
        rows.append(ok("run_root", f"{root}, writable"))
        gpus = visible_gpus()
        plan = plan_probe(
            visit.name,
            visit.site,
            folder,
            1,
            cluster.gpus_per_node or gpus or 1,
            "gpu" if gpus else "cpu",
        )
        fill(folder, plan, visit.site)
        visit.say("looking at this machine …")
        here.run_here(folder, "facts")
        if seen := here.gpus_seen(folder):
            visit.say("measuring an all-reduce …")
            here.run_here(folder, "reduce", GPTCTL_GPUS=seen)
        promised = (
            (cluster.gpus_per_node or gpus) if gpus else 0
        )  # without any, a number means ranks
        wanted = Promised(promised, cluster.gpus_per_node or gpus or 1, several=False)
        rows += rows_of(folder, [here.this_host()], Sightings(folder, 1), wanted)
    return rows


def _on_hosts(visit: Visit, cluster: Cluster, rows: list[Row]) -> Report:
    from gptctl.doctor.ssh_hosts import Hosts
    from gptctl.remote.connection import routes

    nodes = visit.nodes or len(cluster.hosts)
    if nodes > len(cluster.hosts):
        rows.append(
            wrong(
                "nodes",
                f"{nodes} asked for, the profile lists {len(cluster.hosts)}",
                "list more hosts",
            )
        )
        return Report(cluster.name, rows)
    hosts = Hosts(cluster, routes(cluster)[:nodes])
    visit.say(f"connecting to {count(nodes, 'host')} …")
    rows += hosts.connect()
    with tempfile.TemporaryDirectory(prefix="gptctl-doctor-") as place:
        folder = Path(place)
        run_dir = f"{cluster.run_root}/.doctor-{secrets.token_hex(4)}"
        fewest = min(host.gpus or cluster.gpus_per_node or 1 for host in cluster.hosts[:nodes])
        plan = plan_probe(visit.name, visit.site, Path(run_dir), nodes, fewest, "cpu")
        fill(folder, plan, visit.site)
        try:
            rows += hosts.make(run_dir, folder)
            rows += _seen_on_hosts(visit, hosts, plan, folder)
        finally:
            with undisturbed():
                hosts.remove(run_dir)
    return Report(cluster.name, rows, is_in_reach=bool(hosts.open))


def _seen_on_hosts(visit: Visit, hosts: Hosts, plan: LaunchPlan, folder: Path) -> list[Row]:
    head = {"MASTER_ADDR": hosts.address(), "MASTER_PORT": "1"}
    visit.say("looking at the hosts …")
    rows = hosts.clocks()
    hosts.act("facts", plan, folder, **head)
    gpus = [read_text(folder / f"node.{number}.gpus").strip() for number in range(plan.nodes)]
    names = [route.name for route in hosts.routes]
    if first := read_json(folder / "node.0.json"):
        rows.append(judge_port(names[0], first))
    if first and first["port"] and all(gpus):
        visit.say("measuring an all-reduce …")
        head |= {"MASTER_PORT": str(first["port"]), "GPTCTL_GPUS": min(gpus, key=int)}
        hosts.act("reduce", plan, folder, **head)
    has_gpus = any(
        number not in ("", "0") for number in gpus
    )  # without any, a number in the profile means ranks
    wanted = Promised(plan.per_node if has_gpus else 0, plan.per_node, several=plan.nodes > 1)
    away = {name for number, name in enumerate(names) if number not in hosts.open}
    return [row for row in [*rows, *rows_of(folder, names, None, wanted)] if row.node not in away]


def _on_slurm(visit: Visit, cluster: Cluster, rows: list[Row]) -> Report:
    visit.say("asking Slurm what there is …")
    try:
        sight = slurm_side.look(cluster)
        rows += sight.rows
        if not sight.answers:
            return Report(cluster.name, rows, is_in_reach=False)
        _on_nodes(visit, cluster, sight, rows)
    except SlurmError as error:
        rows.append(wrong("Slurm", error.said, error.hint or "does this command work in a shell?"))
        return Report(cluster.name, rows, is_in_reach=not error.is_doubtful)
    return Report(cluster.name, rows)


def _on_nodes(visit: Visit, cluster: Cluster, sight: slurm_side.Sight, rows: list[Row]) -> None:
    nodes = visit.nodes or min(USUAL_NODES, sight.most)
    root = cluster.run_root
    with _guarded(rows, root), folder_in(Path(os.path.expanduser(root))) as folder:
        rows.append(ok("run_root", f"{root}, writable"))
        if not _can_be_asked(sight.rows) or not sight.most:
            rows.append(Row("nodes", "", "notice", "not looked at", "see what is wrong above"))
            return
        if nodes > sight.most:
            rows.append(
                wrong(
                    "nodes",
                    f"{nodes} asked for, a job can have {sight.most}",
                    f"--nodes {sight.most}",
                )
            )
            return
        is_gpu = cluster.gpu_request != "none" and sight.gpus(nodes) > 0
        promised = cluster.gpus_per_node or (sight.gpus(nodes) if is_gpu else 1)
        # A number that no node has is host_errors above: the rest is looked at with what there is.
        per_node = min(promised, sight.gpus(nodes)) if is_gpu else promised
        plan = plan_probe(
            visit.name, visit.site, folder, nodes, per_node, "gpu" if is_gpu else "cpu"
        )
        fill(folder, plan, visit.site)
        sightings = Sightings(folder, nodes)
        rows.append(run_on_nodes(folder, nodes, visit.timeout, sightings, visit.say))
        if (folder / "hosts").exists():
            wanted = Promised(per_node if is_gpu else 0, per_node, several=nodes > 1)
            rows += rows_of(folder, node_names(folder, nodes), sightings, wanted)


def _can_be_asked(rows: Iterable[Row]) -> bool:
    """Without commands or a partition sbatch could only fail."""
    return not any(row.state == "wrong" and row.check in ("commands", "partition") for row in rows)
