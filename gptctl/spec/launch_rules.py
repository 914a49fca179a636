"""Rules over the `Launch` section and the cluster it names. Pure: frozen data in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from gptctl.engine.launch_plan import seconds_of
from gptctl.spec.cluster import Cluster
from gptctl.spec.cluster_kinds import KINDS
from gptctl.spec.launch import MAX_PER_NODE, OWN_KEY, Launch, is_set_by_gptctl, split_endpoint
from trainer.config import Resolved, resolve
from trainer.config.read import Reading
from trainer.errors import Finding, Rule, errors_in
from trainer.layout import DEGREE_KEYS, MACHINE_KEYS, WORLD, Machines, propose

_RDZV = (
    "Launch.rdzv.backend",
    "Launch.rdzv.endpoint",
    "Launch.rdzv.port",
    "Launch.nodes",
    "Launch.cluster",
)

DEVICES = Rule(
    "A002",
    "gpus_per_node is the number of devices",
    uses=("Launch.gpus_per_node", "Launch.devices"),
)
PER_NODE = Rule("A003", "a node has at least gpus_per_node GPUs", uses=MACHINE_KEYS)
HOST_COUNT = Rule(
    "A004", "an ssh cluster has at least as many hosts as the job has nodes", uses=MACHINE_KEYS
)
ELASTIC = Rule(
    "A005",
    "an elastic job (MIN:MAX nodes) leaves dp_degree empty and meets over c10d",
    uses=("Launch.nodes", "Launch.style", "Launch.rdzv.backend", "Distributed.dp_degree"),
)
STYLE = Rule(
    "A006",
    "the launch style suits the cluster and the number of nodes",
    uses=("Launch.style", *MACHINE_KEYS),
)
SECRET = Rule(
    "A007", "a variable is either in env or in secrets", uses=("Launch.env", "Launch.secrets")
)
PORT = Rule(
    "A008",
    "the rendezvous port is free for users and outside the ephemeral range",
    "warning",
    uses=_RDZV,
)
LOOPBACK = Rule(
    "A009", "the rendezvous endpoint of several machines is not their own loopback", uses=_RDZV
)
AGREE = Rule("A010", "what is said twice of the rendezvous agrees", uses=("Launch.style", *_RDZV))
EXTRA = Rule(
    "A011", "slurm.extra repeats no option that gptctl sets itself", uses=("Launch.slurm.extra",)
)
ARGUMENTS = Rule(
    "A012",
    "args are for a script; the bundled trainer is told by keys",
    uses=("Launch.args", "Launch.entrypoint"),
)
NO_SLURM = Rule(
    "A013",
    "options of Slurm are for a Slurm cluster",
    "notice",
    uses=("Launch.slurm", "Launch.cluster"),
)
SAVE_BEFORE = Rule(
    "A014",
    "a job has time to train before it saves",
    uses=("Launch.slurm.save_before", "Launch.slurm.time"),
)
DISKS = Rule(
    "A015",
    "on hosts without a shared folder every one holds whole replicas, and so whole checkpoints",
    uses=(*MACHINE_KEYS, *DEGREE_KEYS.values()),
)

OWN_HOST = ("localhost", "::1", "0.0.0.0", "::")
MAX_TRIED = 200  # numbers of nodes of an elastic job; each takes some milliseconds
QUEUE_STYLES = tuple(style for kind in KINDS.values() for style in kind.styles)
FIXED_STYLES = ("standalone", "static", "launch")  # with a number of nodes that is known beforehand


def check_launch(launch: Launch, cluster: Cluster, machines: Machines) -> list[Finding]:
    return [
        *_check_nodes(launch, cluster, machines),
        *_check_names(launch, cluster),
        *_check_rendezvous(launch, cluster, machines),
        *_check_style(launch, cluster, machines),
    ]


def _check_nodes(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if launch.devices and launch.gpus_per_node not in (None, len(launch.devices)):
        message = (
            f"gpus_per_node is {launch.gpus_per_node}, but {len(launch.devices)} devices are listed"
        )
        yield DEVICES.found(
            "Launch.devices", list(launch.devices), message, "delete one of the two"
        )
    if cluster.gpus_per_node and machines.per_node > cluster.gpus_per_node:
        message = f"{machines.per_node} ranks per node, but nodes of {cluster.name} have {cluster.gpus_per_node} GPUs"
        hint = f"use {cluster.gpus_per_node}, and more nodes"
        yield PER_NODE.found("Launch.gpus_per_node", machines.per_node, message, hint)
    numbers = [int(device) for device in launch.devices or () if device.isdigit()]
    if (
        cluster.gpus_per_node
        and max(numbers, default=0) >= cluster.gpus_per_node >= machines.per_node
    ):
        message = f"there is no device {max(numbers)}: nodes of {cluster.name} have {cluster.gpus_per_node} GPUs"
        yield PER_NODE.found("Launch.devices", list(launch.devices or ()), message, "count from 0")
    for host in cluster.hosts[: machines.nodes]:
        if host.gpus and machines.per_node > host.gpus:
            message = f"{machines.per_node} ranks per node, but {host.host} has {host.gpus} GPUs"
            yield PER_NODE.found(
                "Launch.gpus_per_node",
                machines.per_node,
                message,
                f"use {host.gpus}, and more nodes",
            )
    if cluster.traits.has_hosts and machines.nodes > len(cluster.hosts):
        message = f"{machines.nodes} nodes, but {cluster.name} lists {len(cluster.hosts)} hosts"
        yield HOST_COUNT.found(
            "Launch.nodes", machines.nodes, message, "use fewer nodes, or add hosts to the profile"
        )


def _check_names(launch: Launch, cluster: Cluster) -> Iterator[Finding]:
    if launch.args and launch.entrypoint == "trainer":
        hint = "use -o KEY=VALUE, or name a script: gptctl submit -- SCRIPT ARGS"
        yield ARGUMENTS.found(
            "Launch.args", list(launch.args), "args, but the entrypoint is the trainer", hint
        )
    unused = [
        name
        for name in ("partition", "account", "cpus_per_task", "requeue", "extra")
        if getattr(launch.slurm, name)
    ]
    if unused and not cluster.traits.has_queue:
        verb = "has" if len(unused) == 1 else "have"
        message = f"{', '.join(unused)} {verb} no effect on {cluster.name}, a cluster of kind {cluster.kind}"
        yield NO_SLURM.found("Launch.slurm", None, message)
    limit, warning = launch.slurm.time, launch.slurm.save_before
    if limit and warning and warning >= seconds_of(limit):
        message = f"{warning} s before the time limit of {limit} it has not begun"
        yield SAVE_BEFORE.found(
            "Launch.slurm.save_before", warning, message, "leave it empty, or ask for more time"
        )
    for option in sorted(filter(is_set_by_gptctl, launch.slurm.extra)):
        message = f"gptctl sets --{option} itself, or cannot use it"
        yield EXTRA.found(f"Launch.slurm.extra.{option}", None, message, OWN_KEY)
    for name in sorted(set(launch.env) & set(launch.secrets)):
        yield SECRET.found(
            f"Launch.secrets.{name}", None, f"{name} is in Launch.env too", "delete it there"
        )


def _check_rendezvous(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    endpoint = launch.rdzv.endpoint
    host, endpoint_port = split_endpoint(endpoint) if endpoint else ("", None)
    if (
        machines.nodes > 1
        and not cluster.traits.is_one_machine
        and (host in OWN_HOST or host.startswith("127."))
    ):
        message, hint = (
            f"{host} is a different machine on every node",
            "leave it empty: the first host is taken",
        )
        yield LOOPBACK.found("Launch.rdzv.endpoint", endpoint, message, hint)
    if endpoint_port and launch.rdzv.port not in (None, endpoint_port):
        message = f"port {launch.rdzv.port}, but the endpoint is {endpoint}"
        yield AGREE.found("Launch.rdzv.port", launch.rdzv.port, message, "delete one of the two")
    port = launch.rdzv.port or endpoint_port
    if port is not None and (port < 1024 or 32768 <= port <= 60999):
        what = (
            "is reserved for root"
            if port < 1024
            else "may be taken by any outgoing connection (32768-60999)"
        )
        yield PORT.found(
            "Launch.rdzv.port", port, f"port {port} {what}", "leave it empty, or use 29500"
        )


def _check_style(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if launch.style in QUEUE_STYLES and launch.style not in cluster.traits.styles:
        message = f"{launch.style} needs a Slurm cluster, {cluster.name} is {cluster.kind}"
        yield STYLE.found(
            "Launch.style", launch.style, message, "leave it empty, or choose a Slurm cluster"
        )
    if launch.style == "standalone" and machines.nodes > 1:
        message = f"standalone is for one node, the job has {machines.nodes}"
        yield STYLE.found(
            "Launch.style", launch.style, message, "leave it empty, or use static or c10d"
        )
    if launch.style in ("static", "c10d") and launch.rdzv.backend not in (None, launch.style):
        message = f"style {launch.style}, but rdzv.backend {launch.rdzv.backend}"
        yield AGREE.found(
            "Launch.rdzv.backend", launch.rdzv.backend, message, "delete one of the two"
        )


def check_elastic(
    launch: Launch, resolved: Resolved, machines: Machines, reading: Reading
) -> Iterator[Finding]:
    fewest, most = launch.node_range
    if fewest == most:
        return
    dp = reading.values.get(DEGREE_KEYS["dp"])
    if dp:
        message = f"dp_degree is written, but the job may have {fewest} to {most} nodes"
        yield ELASTIC.found(DEGREE_KEYS["dp"], dp, message, "leave it empty")
        return
    for key, value in (("style", launch.style), ("rdzv.backend", launch.rdzv.backend)):
        if value in FIXED_STYLES:
            message = f"{value} has a fixed number of nodes"
            yield ELASTIC.found(f"Launch.{key}", value, message, "leave it empty, or use c10d")
    usual = {finding.code for finding in errors_in(resolved.findings)}
    for nodes in range(
        fewest, min(most, fewest + MAX_TRIED)
    ):  # the most nodes are the world of the job itself
        for finding in errors_in(resolve(reading, Machines(nodes, machines.per_node)).findings):
            if finding.code not in usual:
                message, hint = f"on {nodes} nodes: {finding.message}", "change the range of nodes"
                yield finding._replace(
                    key="Launch.nodes", value=launch.nodes, message=message, hint=hint, place=None
                )
                return


def has_private_disks(launch: Launch, cluster: Cluster) -> bool:
    """Whether every node of the job keeps what it writes to itself."""
    keeps_own = not cluster.traits.shares_files and not cluster.shared_fs
    return keeps_own and launch.node_range[1] > 1


def check_disks(
    launch: Launch, cluster: Cluster, machines: Machines, resolved: Resolved
) -> Iterator[Finding]:
    layout, per_node = resolved.layout, machines.per_node
    if (
        launch.entrypoint == "trainer"
        and has_private_disks(launch, cluster)
        and not layout.has_whole_replicas(per_node)
    ):
        ranks = layout.pp * layout.sharding * layout.mp
        message = f"mp × sharding × pp is {ranks}, but a host has {per_node} ranks: checkpoints would be torn"
        whole = propose(layout, machines, True, lambda other: other.has_whole_replicas(per_node))
        hint = "if all hosts see run_root, set shared_fs: true in the profile; "
        hint += f"on disks of their own these work: {'; '.join(map(str, whole))}"
        yield DISKS.found("Launch.cluster", cluster.name, message, hint)


def check_spread(machines: Machines, asked: int, reading: Reading) -> Iterator[Finding]:
    """Where nobody says how many GPUs a node has, the ranks that are asked for must at least spread evenly."""
    if (
        DEGREE_KEYS["dp"] in reading.values and asked % machines.nodes
    ) or machines.per_node > MAX_PER_NODE:
        message = f"{asked:,} ranks (mp × sharding × pp × dp) cannot be spread over {machines.nodes} nodes"
        yield WORLD.found(
            "Launch.nodes", machines.nodes, message, "set gpus_per_node, or change nodes or degrees"
        )
