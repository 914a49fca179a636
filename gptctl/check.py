"""The story of one check: config and flags, profile, layout, memory, environment; every finding at once.

Reads files, changes nothing, and knows neither terminals nor schedulers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gptctl.cluster import Cluster, Profile, load_profile, visible_gpus
from gptctl.environ import Job, lint
from gptctl.launch import Launch
from trainer.config import Override, Resolved, load_tree, read_run, resolve
from trainer.config.read import Reading, build
from trainer.errors import WRONG_USAGE, Finding, Rule, UserError, errors_in, in_order
from trainer.estimate import GIB, Estimate, estimate, savings
from trainer.layout import WORLD, Machines

CLUSTER = Rule("A001", "Launch.cluster names a profile that can be used")
DEVICES = Rule("A002", "gpus_per_node is the number of devices", uses=("Launch",))
PER_NODE = Rule("A003", "a node has at least gpus_per_node GPUs", uses=("Launch",))
HOST_COUNT = Rule("A004", "an ssh cluster has at least as many hosts as the job has nodes", uses=("Launch",))
ELASTIC = Rule(
    "A005", "an elastic job (MIN:MAX nodes) leaves dp_degree empty and meets over c10d", uses=("Launch", "Distributed")
)
STYLE = Rule("A006", "the launch style suits the cluster and the number of nodes", uses=("Launch",))
SECRET = Rule("A007", "a variable is either in env or in secrets", uses=("Launch",))
PORT = Rule(
    "A008", "the rendezvous port is free for users and outside the ephemeral range", "warning", uses=("Launch",)
)
LOOPBACK = Rule("A009", "the rendezvous endpoint of several machines is not their own loopback", uses=("Launch",))
MEMORY = Rule(
    "M001",
    "the estimated memory of a rank is at most gpu_memory_gb",
    "warning",
    uses=("Model", "Global", "Distributed"),
)

SLURM_STYLES = ("sbatch", "srun-script", "loop")
CONFIG_NAMES = ("{}.yaml", "{}.yml", "{}s.yaml", "configs/{}.yaml")


class Checked(NamedTuple):
    """What is known of a config after checking it; `resolved` is None when its text could not be read."""

    path: Path | None
    findings: tuple[Finding, ...]
    launch: Launch
    cluster: Cluster
    machines: Machines
    resolved: Resolved | None = None
    estimate: Estimate | None = None
    launch_origins: Mapping[str, str] = MappingProxyType({})

    @property
    def is_valid(self) -> bool:
        return not errors_in(self.findings)


def find_config(name: str | None) -> Path:
    """CONFIG as a path or as a bare name: `config` finds config.yaml, config.yml, configs.yaml, configs/config.yaml."""
    if name is not None and os.path.isfile(name):
        return Path(name)
    bare = name or "config"
    tried = [pattern.format(bare) for pattern in CONFIG_NAMES]
    if not bare.endswith((".yaml", ".yml", ".json")):
        for candidate in tried:
            if os.path.isfile(candidate):
                return Path(candidate)
    if name is not None and (os.path.exists(name) or "/" in name or "." in name):
        return Path(name)  # reading it says what is wrong
    raise UserError(f"no config found: tried {', '.join(tried)}", "`gptctl init` writes one", WRONG_USAGE)


def check_config(path: Path | None, overrides: Iterable[Override]) -> Checked:
    found: list[Finding] = []
    tree = load_tree(path, overrides, found)
    if tree is None:
        return Checked(path, in_order(found), Launch(), Cluster(), Machines(1, 1))
    reading = read_run(tree, found, others={"Launch": Launch})
    launch = build(Launch, reading.values, "Launch")
    profile = _profile(launch, reading)
    cluster = profile.cluster if profile else Cluster()
    machines = _machines(launch, cluster, reading)
    resolved = resolve(reading, machines)
    known = None if errors_in(resolved.findings) else estimate(resolved.run, resolved.layout)
    judged = [*_check_launch(launch, cluster, machines, reading), *_check_elastic(launch, machines, reading)]
    if known:
        judged += _check_memory(resolved, known, cluster)
    judged = [finding.at(reading.place_of(finding.key, "Launch")) for finding in judged]
    judged = [finding for finding in judged if not any(reading.is_bad(key) for key in finding.uses)]
    judged += _lint(launch, profile, machines, resolved, reading)
    findings = in_order([*resolved.findings, *(profile.findings if profile else ()), *judged])
    origins = {key: str(reading.places[key]) for key in reading.values if key.startswith("Launch.")}
    return Checked(path, findings, launch, cluster, machines, resolved, known, origins)


def _profile(launch: Launch, reading: Reading) -> Profile | None:
    try:
        return load_profile(launch.cluster)
    except UserError as error:
        place = reading.place_of("Launch.cluster")
        reading.found.append(CLUSTER.found("Launch.cluster", launch.cluster, error.message, error.hint, place))
        reading.bad.add("Launch.cluster")
        return None


def _machines(launch: Launch, cluster: Cluster, reading: Reading) -> Machines:
    """Nodes × ranks per node; where nobody says how many GPUs a node has, as many ranks as the degrees ask for."""
    nodes = launch.node_range[1]
    per_node = launch.gpus_per_node or len(launch.devices or ()) or cluster.gpus_per_node
    if not per_node and cluster.kind == "local" and reading.values.get("Global.device", "gpu") == "gpu":
        per_node = visible_gpus()
    return Machines(nodes, per_node or math.ceil(_ranks_asked(reading) / nodes))


def _ranks_asked(reading: Reading) -> int:
    keys = (
        "Distributed.dp_degree",
        "Distributed.pp_degree",
        "Distributed.sharding.sharding_degree",
        "Distributed.mp_degree",
    )
    return math.prod(reading.values.get(key, 1) for key in keys)


def _check_launch(launch: Launch, cluster: Cluster, machines: Machines, reading: Reading) -> Iterator[Finding]:
    if launch.devices and launch.gpus_per_node not in (None, len(launch.devices)):
        message = f"gpus_per_node is {launch.gpus_per_node}, but {len(launch.devices)} devices are listed"
        yield DEVICES.found("Launch.devices", list(launch.devices), message, "delete one of the two")
    if cluster.gpus_per_node and machines.per_node > cluster.gpus_per_node:
        message = f"{machines.per_node} ranks per node, but nodes of {cluster.name} have {cluster.gpus_per_node} GPUs"
        hint = f"use {cluster.gpus_per_node}, and more nodes"
        yield PER_NODE.found("Launch.gpus_per_node", machines.per_node, message, hint)
    if cluster.kind == "ssh" and machines.nodes > len(cluster.hosts):
        message = f"{machines.nodes} nodes, but {cluster.name} lists {len(cluster.hosts)} hosts"
        yield HOST_COUNT.found("Launch.nodes", machines.nodes, message, "use fewer nodes, or add hosts to the profile")
    for name in sorted(set(launch.env) & set(launch.secrets)):
        yield SECRET.found(f"Launch.secrets.{name}", None, f"{name} is in Launch.env too", "delete it there")
    yield from _check_rendezvous(launch, cluster, machines)
    yield from _check_style(launch, cluster, machines)


def _check_rendezvous(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    host, _, port_text = (launch.rdzv.endpoint or "").rpartition(":")
    host, port_text = (host, port_text) if host and port_text.isdigit() else (launch.rdzv.endpoint or "", "")
    if machines.nodes > 1 and cluster.kind != "local" and (host == "localhost" or host.startswith("127.")):
        message = f"{host} is a different machine on every node"
        yield LOOPBACK.found(
            "Launch.rdzv.endpoint", launch.rdzv.endpoint, message, "leave it empty: the first host is taken"
        )
    port = launch.rdzv.port or (int(port_text) if port_text else None)
    if port is not None and (port < 1024 or 32768 <= port <= 60999):
        what = "is reserved for root" if port < 1024 else "may be taken by any outgoing connection (32768-60999)"
        yield PORT.found("Launch.rdzv.port", port, f"port {port} {what}", "leave it empty, or use 29500")


def _check_style(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if launch.style in SLURM_STYLES and cluster.kind != "slurm":
        message = f"{launch.style} needs a Slurm cluster, {cluster.name} is {cluster.kind}"
        yield STYLE.found("Launch.style", launch.style, message, "leave it empty, or choose a Slurm cluster")
    if launch.style == "standalone" and machines.nodes > 1:
        message = f"standalone is for one node, the job has {machines.nodes}"
        yield STYLE.found("Launch.style", launch.style, message, "leave it empty, or use static or c10d")


def _check_elastic(launch: Launch, machines: Machines, reading: Reading) -> Iterator[Finding]:
    fewest, most = launch.node_range
    if fewest == most:
        return
    if "Distributed.dp_degree" in reading.values:
        message = f"dp_degree is written, but the job may have {fewest} to {most} nodes"
        yield ELASTIC.found("Distributed.dp_degree", reading.values["Distributed.dp_degree"], message, "leave it empty")
    if launch.rdzv.backend == "static":
        message = "a static rendezvous has a fixed number of nodes"
        yield ELASTIC.found("Launch.rdzv.backend", "static", message, "leave it empty, or use c10d")
    rest = _ranks_asked(reading) // reading.values.get("Distributed.dp_degree", 1)
    unfit = [nodes for nodes in range(fewest, most) if nodes * machines.per_node % rest]
    if unfit:
        ranks = unfit[0] * machines.per_node
        message = f"on {unfit[0]} nodes mp × sharding × pp = {rest} does not divide {ranks} GPUs"
        yield WORLD.found(
            "Launch.nodes", launch.nodes, message, f"use multiples of {rest} GPUs for every number of nodes"
        )


def _check_memory(resolved: Resolved, known: Estimate, cluster: Cluster) -> Iterator[Finding]:
    if not cluster.gpu_memory_gb or known.memory.total <= cluster.gpu_memory_gb * GIB:
        return
    need = known.memory.total / GIB
    message = f"about {need:.1f} GiB per GPU, {cluster.name} has {cluster.gpu_memory_gb:g}"
    helpful = savings(resolved.run, resolved.layout, cluster.gpu_memory_gb * GIB)
    hint = (
        f"one of these would do: {'; '.join(helpful)}" if helpful else "raise sharding_degree, mp_degree or pp_degree"
    )
    yield MEMORY.found("Distributed", round(need, 1), message, hint)


def _lint(
    launch: Launch, profile: Profile | None, machines: Machines, resolved: Resolved, reading: Reading
) -> list[Finding]:
    """The environment lint, each finding at the line that sets the variable; a run config wins over its profile."""
    environment = {**(profile.cluster.env if profile else {}), **launch.env}
    cpus = launch.slurm.cpus_per_task or (profile.cluster.cpus_per_task if profile else None)
    layout = resolved.layout
    job = Job(
        nodes=machines.nodes,
        world=machines.world,
        device=resolved.run.Global.device,
        mp=layout.mp,
        sharding=layout.sharding,
        cpus_per_task=cpus,
        gpus_per_node=machines.per_node,
    )
    findings = []
    for finding in lint(environment, job):
        place = reading.place_of(f"Launch.env.{finding.key}")
        if place is None and profile:
            place = profile.reading.place_of(f"env.{finding.key}")
        findings.append(finding.at(place))
    return findings
