"""Check one cluster: its profile, then what its kind allows: scheduler, run_root, nodes.

A kind without an entry in `EXAMINATIONS` gets the checks of the profile only.
"""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.direct_access import DirectAccess
from gptctl.doctor import local_node, slurm_checks
from gptctl.doctor.node_rows import EnginePython, ExpectedNode, engine_row, port_row
from gptctl.doctor.probe import (
    BATCH_SCRIPT,
    ENGINE_SCRIPT,
    ArrivalTracker,
    collect_rows,
    node_names,
    plan_probe,
    temporary_folder,
    write_scripts,
)
from gptctl.doctor.rows import Row, is_wrong, notice, ok, profile_row, wrong
from gptctl.doctor.signals import signals_blocked, signals_interrupt
from gptctl.doctor.slurm_job import DoctorFolder, run_on_nodes
from gptctl.engine.file_reading import read_json, read_text
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.build import Site
from gptctl.reporting import Say
from gptctl.spec.check import check_config
from gptctl.spec.cluster import Cluster, Profile, load_profile, profile_source
from gptctl.spec.trust import settle_trust
from gptctl.spec.visible_gpus import count_visible_gpus
from gptctl.text import count
from trainer.config import Override
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, Finding, UserError

if TYPE_CHECKING:
    from gptctl.backends.slurm.login_access import LoginAccess
    from gptctl.doctor.ssh_hosts import DoctorHosts

DEFAULT_NODES = 2  # on Slurm: enough to test the network between nodes


class DoctorRequest(NamedTuple):
    """What the user asked for."""

    name: str  # of the cluster, or the path of its profile
    nodes: int | None
    timeout: float
    site: Site
    say: Say
    trust: bool = False  # whether to trust the profile as it is now
    # As it was read when it was trusted: its file may have changed since.
    profile: Profile | None = None


class DoctorReport(NamedTuple):
    cluster: str
    rows: list[Row]
    is_in_reach: bool = True

    @property
    def exit_code(self) -> int:
        if not self.is_in_reach:
            return OUT_OF_REACH
        return ANSWER_IS_NO if is_wrong(self.rows) else 0


def examine(request: DoctorRequest) -> DoctorReport:
    profile = load_profile(request.name)
    cluster = profile.cluster
    rows = [*_profile_rows(request.name, profile)]
    if is_wrong(rows):  # what follows would fail for the same reasons
        return DoctorReport(cluster.name, rows)
    source = profile_source(profile, request.name, is_typed=True)
    settle_trust([source], request.trust)
    request = request._replace(profile=profile)
    with signals_interrupt():
        report = EXAMINATIONS.get(cluster.kind, _examine_profile_only)(request, cluster)
    return report._replace(rows=[*rows, *report.rows])


def _profile_rows(name: str, profile: Profile) -> Iterator[Row]:
    """What `validate` finds in the profile, including its environment."""
    file = profile.file.path
    found = list(profile.findings)
    # A profile with errors has no values that could be checked further.
    if not any(finding.level == "error" for finding in found):
        named = Override("Launch.cluster", name, "--cluster", verbatim=True)
        checked = check_config(None, [named], profile)
        found += [each for each in checked.findings if each not in found and _is_about(each, file)]
    yield from map(profile_row, found)
    if not any(finding.level in ("error", "warning") for finding in found):
        yield ok("profile", file)


def _is_about(finding: Finding, file: str) -> bool:
    # Findings about the default run config do not concern the cluster.
    return finding.key == "Launch.cluster" or (
        finding.place is not None and finding.place.file == file
    )


def _examine_profile_only(request: DoctorRequest, cluster: Cluster) -> DoctorReport:
    found = f"not checked: gptctl has no checks for nodes of kind {cluster.kind}"
    row = notice("nodes", found, "submit a short job to test the cluster")
    return DoctorReport(cluster.name, [row])


@contextmanager
def _folder_errors(rows: list[Row], root: str) -> Iterator[None]:
    """A folder that cannot be used is a row of the report, not the end of it."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else root
        fix = "choose a folder that you can write to"
        rows.append(wrong("run_root", f"{where}: {error.strerror}", fix))


def _examine_local(request: DoctorRequest, cluster: Cluster) -> DoctorReport:
    if request.nodes not in (None, 1):
        raise UserError("a local cluster is one machine", "leave out --nodes", WRONG_USAGE)
    root = request.site.absolute(cluster.run_root)
    rows: list[Row] = []
    # Jobs create run_root if it is missing: whether that works is the first thing to know.
    with _folder_errors(rows, root), temporary_folder(Path(root)) as folder:
        rows.append(ok("run_root", f"{root} is writable"))
        rows += _local_rows(request, cluster, folder)
    return DoctorReport(cluster.name, rows)


def _local_rows(request: DoctorRequest, cluster: Cluster, folder: Path) -> list[Row]:
    gpus, host = count_visible_gpus(), local_node.host_name()
    per_node = cluster.gpus_per_node or gpus or 1
    device = "gpu" if gpus else "cpu"
    plan = plan_probe(request.name, request.profile, request.site, folder, 1, per_node, device)
    write_scripts(folder, plan, request.site)
    request.say("checking this machine …")
    local_node.run_script(folder, "facts")
    if number := local_node.visible_to_torch(folder):  # "0" counts: torch is there
        request.say("measuring an all-reduce …")
        local_node.run_script(folder, "reduce", GPTCTL_GPUS=number)
    # Without GPUs, gpus_per_node is a number of ranks.
    expected = ExpectedNode(per_node if gpus else 0, per_node, has_peers=False)
    # On this machine, the Python that runs gptctl runs its engine too.
    engine = EnginePython(host, request.site.python, platform.python_version())
    rows = collect_rows(folder, [host], None, expected)
    return [engine_row(engine), *rows]


def _examine_ssh(request: DoctorRequest, cluster: Cluster) -> DoctorReport:
    from gptctl.doctor.ssh_hosts import DoctorHosts
    from gptctl.remote.connection import routes

    nodes = request.nodes or len(cluster.hosts)
    if nodes > len(cluster.hosts):
        found = f"{nodes} requested, but the profile lists {len(cluster.hosts)}"
        return DoctorReport(cluster.name, [wrong("nodes", found, "list more hosts")])
    hosts = DoctorHosts(cluster, routes(cluster)[:nodes])
    request.say(f"connecting to {count(nodes, 'host')} …")
    rows = hosts.connect()
    # Hosts may not share a folder with this machine: what they write is copied to `folder`.
    with tempfile.TemporaryDirectory(prefix="gptctl-doctor-") as place:
        folder = Path(place)
        run_dir = f"{cluster.run_root}/.doctor-{secrets.token_hex(4)}"
        fewest = min(host.gpus or cluster.gpus_per_node or 1 for host in cluster.hosts[:nodes])
        plan = plan_probe(
            request.name, request.profile, request.site, Path(run_dir), nodes, fewest, "cpu"
        )
        write_scripts(folder, plan, request.site)
        try:
            rows += hosts.create_folders(run_dir, folder)
            rows += _ssh_rows(request, hosts, plan, folder)
        finally:
            with signals_blocked():
                hosts.remove_folders(run_dir)
    return DoctorReport(cluster.name, rows, is_in_reach=bool(hosts.connections))


def _ssh_rows(
    request: DoctorRequest, hosts: DoctorHosts, plan: LaunchPlan, folder: Path
) -> list[Row]:
    # The facts need no port, but they report one that is free on the first host.
    head = {"MASTER_ADDR": hosts.head_address(), "MASTER_PORT": "1"}
    request.say("checking the hosts …")
    rows = hosts.clock_rows()
    hosts.run_scripts("facts", plan, folder, **head)
    gpus = [read_text(folder / f"node.{number}.gpus").strip() for number in range(plan.nodes)]
    names = [route.name for route in hosts.routes]
    if first := read_json(folder / "node.0.json"):
        rows.append(port_row(names[0], first))
    if first and first["port"] and all(gpus):
        request.say("measuring an all-reduce …")
        head |= {"MASTER_PORT": str(first["port"]), "GPTCTL_GPUS": min(gpus, key=int)}
        hosts.run_scripts("reduce", plan, folder, **head)
    # If no host has a GPU, gpus_per_node is a number of ranks.
    has_gpus = any(number not in ("", "0") for number in gpus)
    per_node = plan.per_node
    expected = ExpectedNode(per_node if has_gpus else 0, per_node, has_peers=plan.nodes > 1)
    # A host that cannot be reached has a row that says so: the others would only repeat it.
    lost = {name for number, name in enumerate(names) if number not in hosts.connections}
    others = [host.host for host in hosts.cluster.hosts[plan.nodes :]]  # with --nodes
    rows += collect_rows(folder, names, None, expected, others=others)
    return [row for row in rows if row.node not in lost]


def _examine_slurm(request: DoctorRequest, cluster: Cluster) -> DoctorReport:
    rows: list[Row] = []
    try:
        access = _slurm_access(request, cluster)
        if cluster.login:
            request.say(f"connecting to {cluster.login.host} …")
            rows.append(_login_row(access))
            if is_wrong(rows):
                return DoctorReport(cluster.name, rows, is_in_reach=False)
        request.say("querying Slurm …")
        status = slurm_checks.check_slurm(cluster, access.client)
        rows += status.rows
        if not status.answers:
            return DoctorReport(cluster.name, rows, is_in_reach=False)
        _check_slurm_nodes(request, cluster, status, rows, access)
    except SlurmError as error:
        rows.append(wrong("Slurm", error.detail, error.hint or "run the command in a shell"))
        # A refusal is an answer; only silence means that the cluster is out of reach.
        return DoctorReport(cluster.name, rows, is_in_reach=not error.is_doubtful)
    return DoctorReport(cluster.name, rows)


def _slurm_access(request: DoctorRequest, cluster: Cluster) -> DirectAccess | LoginAccess:
    if not cluster.login:
        return DirectAccess()
    from gptctl.backends.slurm.login_access import LoginAccess

    return LoginAccess(cluster, request.say)


def _login_row(access: Any) -> Row:
    try:
        return ok("login", f"{access.check()}: authenticated, host key matches", access.host)
    except SlurmError as error:
        return wrong("login", error.detail, error.hint or "try it with ssh", access.host)


def _check_slurm_nodes(
    request: DoctorRequest,
    cluster: Cluster,
    status: slurm_checks.SlurmStatus,
    rows: list[Row],
    access: DirectAccess | LoginAccess,
) -> None:
    nodes = request.nodes or min(DEFAULT_NODES, status.max_nodes)
    root = cluster.run_root
    with _folder_errors(rows, root), _slurm_folder(root, access) as folder:
        rows.append(ok("run_root", f"{root} is writable"))
        if not _can_submit(status.rows) or not status.max_nodes:
            rows.append(notice("nodes", "not checked", "fix the problems above first"))
        elif nodes > status.max_nodes:
            found = f"{nodes} requested, but a job can have at most {status.max_nodes}"
            rows.append(wrong("nodes", found, f"use --nodes {status.max_nodes}"))
        else:
            rows += _slurm_rows(request, cluster, status, folder, nodes, access.client)


@contextmanager
def _slurm_folder(root: str, access: DirectAccess | LoginAccess) -> Iterator[DoctorFolder]:
    if isinstance(access, DirectAccess):
        with temporary_folder(Path(os.path.expanduser(root))) as folder:
            yield DoctorFolder(folder, str(folder))
        return
    from gptctl.doctor.login_folder import login_folder

    with login_folder(access, root) as place:
        yield place


def _slurm_rows(
    request: DoctorRequest,
    cluster: Cluster,
    status: slurm_checks.SlurmStatus,
    folder: DoctorFolder,
    nodes: int,
    client: SlurmClient,
) -> list[Row]:
    available = status.gpus(nodes)
    is_gpu = cluster.gpu_request != "none" and available > 0
    per_node = cluster.gpus_per_node or (available if is_gpu else 1)
    if is_gpu:
        # More than a node has is a problem already reported: check the rest with what there is.
        per_node = min(per_node, available)
    device, here = "gpu" if is_gpu else "cpu", folder.here
    plan = plan_probe(
        request.name, request.profile, request.site, Path(folder.there), nodes, per_node, device
    )
    write_scripts(here, plan, request.site, BATCH_SCRIPT, ENGINE_SCRIPT)
    folder.push()
    tracker = ArrivalTracker(here, nodes)
    rows = [run_on_nodes(client, folder, nodes, request.timeout, tracker, request.say)]
    if (here / "hosts").exists():  # the batch script has started
        expected = ExpectedNode(per_node if is_gpu else 0, per_node, has_peers=nodes > 1)
        names = node_names(here, nodes)
        # Firewall lines of some nodes would lock out the others, on which jobs run, too.
        root, others = os.path.dirname(folder.there), status.others(nodes)
        rows += collect_rows(here, names, tracker, expected, root, others)
    return rows


def _can_submit(rows: Iterable[Row]) -> bool:
    """Without Slurm's commands or a partition, sbatch can only fail."""
    return not any(row.state == "wrong" and row.check in ("commands", "partition") for row in rows)


EXAMINATIONS: Mapping[str, Callable[[DoctorRequest, Cluster], DoctorReport]] = {
    "local": _examine_local,
    "slurm": _examine_slurm,
    "ssh": _examine_ssh,
}
