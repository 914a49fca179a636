"""Check the `Launch` section and its cluster profile against each other.

Pure: frozen data in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator

from gptctl.engine.launch_plan import seconds_of
from gptctl.spec.cluster import Cluster
from gptctl.spec.cluster_kinds import KINDS
from gptctl.spec.launch import MAX_PER_NODE, OWN_KEY, Launch, is_set_by_gptctl, split_endpoint
from gptctl.text import count
from trainer.config import Resolved, resolve
from trainer.config.read import Reading
from trainer.errors import Finding, Rule, errors_in
from trainer.layout import DEGREE_KEYS, Machines
from trainer.layout_rules import MACHINE_KEYS, WORLD, propose

# The keys that all rendezvous rules read: a rule is skipped where one of them is invalid.
_RDZV = (
    "Launch.rdzv.backend",
    "Launch.rdzv.endpoint",
    "Launch.rdzv.port",
    "Launch.nodes",
    "Launch.cluster",
)

# Nodes and GPUs.
DEVICES = Rule(
    "A002",
    "gpus_per_node must equal the number of devices",
    uses=("Launch.gpus_per_node", "Launch.devices"),
)
PER_NODE = Rule("A003", "a node must have at least gpus_per_node GPUs", uses=MACHINE_KEYS)
HOST_COUNT = Rule(
    "A004",
    "an ssh cluster must have at least as many hosts as the job has nodes",
    uses=MACHINE_KEYS,
)
ELASTIC = Rule(
    "A005",
    "an elastic job (MIN:MAX nodes) must leave dp_degree empty and use the c10d rendezvous",
    uses=("Launch.nodes", "Launch.style", "Launch.rdzv.backend", "Distributed.dp_degree"),
)
# Launch styles and rendezvous. torchrun itself reports most of these only after a timeout.
STYLE = Rule(
    "A006",
    "the launch style must fit the cluster and the number of nodes",
    uses=("Launch.style", *MACHINE_KEYS),
)
SECRET = Rule(
    "A007",
    "a variable must not be in both env and secrets",
    uses=("Launch.env", "Launch.secrets"),
)
PORT = Rule(
    "A008",
    "the rendezvous port should be above 1023 and outside the ephemeral range",
    "warning",
    uses=_RDZV,
)
LOOPBACK = Rule(
    "A009",
    "the rendezvous endpoint of a job on several machines must not be a loopback address",
    uses=_RDZV,
)
AGREE = Rule(
    "A010",
    "rendezvous settings given in two places must agree",
    uses=("Launch.style", *_RDZV),
)
# Slurm options, arguments, checkpoints.
EXTRA = Rule(
    "A011",
    "slurm.extra must not contain an option that gptctl sets itself",
    uses=("Launch.slurm.extra",),
)
ARGUMENTS = Rule(
    "A012",
    "args must be empty for the bundled trainer, which is configured by keys",
    uses=("Launch.args", "Launch.entrypoint"),
)
NO_SLURM = Rule(
    "A013",
    "Slurm options should be set for a Slurm cluster only",
    "notice",
    uses=("Launch.slurm", "Launch.cluster"),
)
SAVE_BEFORE = Rule(
    "A014",
    "save_before must be shorter than the time limit",
    uses=("Launch.slurm.save_before", "Launch.slurm.time"),
)
DISKS = Rule(
    "A015",
    "without a shared folder, every host must hold complete replicas, to write checkpoints",
    uses=(*MACHINE_KEYS, *DEGREE_KEYS.values()),
)

# Names and addresses that mean "this machine" on every node.
OWN_HOST = (
    *("localhost", "::1", "::"),
    "0.0.0.0",  # nosec B104  # refused, not bound
)
# Most node counts that are checked for an elastic job: each takes a few milliseconds.
MAX_TRIED = 200
# Styles that print scripts for a scheduler.
QUEUE_STYLES = tuple(style for kind in KINDS.values() for style in kind.styles)
# With these torchrun must know the number of nodes when it starts.
FIXED_STYLES = ("standalone", "static", "launch")


def check_launch(launch: Launch, cluster: Cluster, machines: Machines) -> list[Finding]:
    """Check everything that does not depend on the model or the parallel layout."""
    return [
        *_check_gpus(launch, cluster, machines),
        *_check_hosts(cluster, machines),
        *_check_names(launch),
        *_check_slurm(launch, cluster),
        *_check_rendezvous(launch, cluster, machines),
        *_check_style(launch, cluster, machines),
    ]


def _check_gpus(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if launch.devices and launch.gpus_per_node not in (None, len(launch.devices)):
        number = len(launch.devices)
        message = f"gpus_per_node is {launch.gpus_per_node}, but {number} devices are listed"
        hint = "delete gpus_per_node or devices"
        yield DEVICES.found("Launch.devices", list(launch.devices), message, hint)
    available, where = _fewest_gpus(cluster, machines.nodes)
    if not available:
        return
    have = f"{where} {available} GPUs"
    if machines.per_node > available:
        message = f"{machines.per_node} ranks per node, but {have}"
        hint = f"set it to {available}, and use more nodes"
        yield PER_NODE.found("Launch.gpus_per_node", machines.per_node, message, hint)
    # UUIDs of GPUs (GPU-…, MIG-…) cannot be checked from here, device numbers can.
    numbers = [int(device) for device in launch.devices or () if device.isdigit()]
    if max(numbers, default=0) >= available >= machines.per_node:
        message, hint = f"device {max(numbers)} does not exist: {have}", f"use 0 to {available - 1}"
        yield PER_NODE.found("Launch.devices", list(launch.devices or ()), message, hint)


def _fewest_gpus(cluster: Cluster, nodes: int) -> tuple[int | None, str]:
    """The GPUs of the smallest node, and the words that say whose they are."""
    # Hosts of an ssh cluster may differ: only those that the job would run on are checked.
    known = [(host.gpus, f"{host.host} has") for host in cluster.hosts[:nodes] if host.gpus]
    if cluster.gpus_per_node and (not known or len(known) < len(cluster.hosts[:nodes])):
        known.append((cluster.gpus_per_node, f"nodes of {cluster.name} have"))
    return min(known, default=(None, ""), key=lambda each: each[0] or 0)


def _check_hosts(cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if cluster.traits.has_hosts and machines.nodes > len(cluster.hosts):
        message = f"{machines.nodes} nodes, but {cluster.name} lists {len(cluster.hosts)} hosts"
        yield HOST_COUNT.found(
            "Launch.nodes", machines.nodes, message, "use fewer nodes, or add hosts to the profile"
        )


def _check_names(launch: Launch) -> Iterator[Finding]:
    if launch.args and launch.entrypoint == "trainer":
        hint = "use -o KEY=VALUE, or name a script: gptctl submit -- SCRIPT ARGS"
        yield ARGUMENTS.found(
            "Launch.args", list(launch.args), "args are set, but the entrypoint is trainer", hint
        )
    # env is printed and stored with the job; a secret there would leak.
    for name in sorted(set(launch.env) & set(launch.secrets)):
        message, hint = f"{name} is also in Launch.env", "delete it from Launch.env"
        yield SECRET.found(f"Launch.secrets.{name}", None, message, hint)


def _check_slurm(launch: Launch, cluster: Cluster) -> Iterator[Finding]:
    # slurm.time is not among these: it limits jobs on every kind of cluster.
    names = ("partition", "account", "cpus_per_task", "requeue", "extra")
    unused = [name for name in names if getattr(launch.slurm, name)]
    if unused and not cluster.traits.has_queue:
        verb = "has" if len(unused) == 1 else "have"
        message = f"{', '.join(unused)} {verb} no effect on {cluster.name} (kind {cluster.kind})"
        yield NO_SLURM.found("Launch.slurm", None, message)
    # With save_before >= time the job would be told to stop as soon as it starts.
    limit, warning = launch.slurm.time, launch.slurm.save_before
    if limit and warning and warning >= seconds_of(limit):
        message = f"{warning} s is not shorter than the time limit of {limit}"
        hint = "use a smaller value, leave it empty, or raise slurm.time"
        yield SAVE_BEFORE.found("Launch.slurm.save_before", warning, message, hint)
    for option in sorted(filter(is_set_by_gptctl, launch.slurm.extra)):
        message = f"gptctl sets --{option} itself, or does not support it"
        yield EXTRA.found(f"Launch.slurm.extra.{option}", None, message, OWN_KEY)


def _check_rendezvous(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    endpoint = launch.rdzv.endpoint
    host, endpoint_port = split_endpoint(endpoint) if endpoint else ("", None)
    # On one machine the loopback address is right: all nodes are processes of that machine.
    if machines.nodes > 1 and not cluster.traits.is_one_machine and is_loopback(host):
        message = f"{host} means a different machine on every node"
        hint = "leave it empty to use the first host"
        yield LOOPBACK.found("Launch.rdzv.endpoint", endpoint, message, hint)
    if endpoint_port and launch.rdzv.port not in (None, endpoint_port):
        message = f"rdzv.port is {launch.rdzv.port}, but rdzv.endpoint is {endpoint}"
        yield AGREE.found("Launch.rdzv.port", launch.rdzv.port, message, "delete rdzv.port")
    yield from _check_port(launch.rdzv.port or endpoint_port)


def is_loopback(host: str) -> bool:
    """Whether this address means another machine on every node."""
    return host in OWN_HOST or host.startswith("127.")


def _check_port(port: int | None) -> Iterator[Finding]:
    # 32768-60999 is Linux's default ip_local_port_range.
    if port is not None and (port < 1024 or 32768 <= port <= 60999):
        what = (
            "is reserved for root"
            if port < 1024
            else "may be in use by an outgoing connection (32768-60999)"
        )
        yield PORT.found(
            "Launch.rdzv.port", port, f"port {port} {what}", "leave it empty, or use 29500"
        )


def _check_style(launch: Launch, cluster: Cluster, machines: Machines) -> Iterator[Finding]:
    if launch.style in QUEUE_STYLES and launch.style not in cluster.traits.styles:
        message = (
            f"{launch.style} needs a Slurm cluster, but {cluster.name} is of kind {cluster.kind}"
        )
        yield STYLE.found(
            "Launch.style", launch.style, message, "leave it empty, or choose a Slurm cluster"
        )
    if launch.style == "standalone" and machines.nodes > 1:
        message = f"standalone is for one node, but the job has {machines.nodes}"
        yield STYLE.found(
            "Launch.style", launch.style, message, "leave it empty, or use static or c10d"
        )
    if launch.style in ("static", "c10d") and launch.rdzv.backend not in (None, launch.style):
        message = f"style is {launch.style}, but rdzv.backend is {launch.rdzv.backend}"
        hint = "delete style or rdzv.backend"
        yield AGREE.found("Launch.rdzv.backend", launch.rdzv.backend, message, hint)


def check_elastic(
    launch: Launch, resolved: Resolved, machines: Machines, reading: Reading
) -> Iterator[Finding]:
    """Check that an elastic job is valid for every number of nodes that it may get."""
    fewest, most = launch.node_range
    if fewest == most:
        return
    # dp is what changes with the number of nodes; all other degrees stay as they are.
    dp = reading.values.get(DEGREE_KEYS["dp"])
    if dp:
        message = f"dp_degree is {dp}, but the job may have {fewest} to {most} nodes"
        yield ELASTIC.found(DEGREE_KEYS["dp"], dp, message, "leave it empty")
        return
    for key, value in (("style", launch.style), ("rdzv.backend", launch.rdzv.backend)):
        if value in FIXED_STYLES:
            message = f"{value} needs a fixed number of nodes, but nodes is {launch.nodes}"
            yield ELASTIC.found(f"Launch.{key}", value, message, "leave it empty, or use c10d")
    # `resolved` holds for the most nodes, so those errors are reported already: `most` is left out,
    # and of the smaller numbers only the first that adds another error is reported.
    usual = {finding.code for finding in errors_in(resolved.findings)}
    for nodes in range(fewest, min(most, fewest + MAX_TRIED)):
        for finding in errors_in(resolve(reading, Machines(nodes, machines.per_node)).findings):
            if finding.code not in usual:
                message, hint = f"with {nodes} nodes: {finding.message}", "change MIN:MAX"
                yield finding._replace(
                    key="Launch.nodes", value=launch.nodes, message=message, hint=hint, place=None
                )
                return


def has_private_disks(launch: Launch, cluster: Cluster) -> bool:
    """Whether each node of the job writes to a disk that the other nodes cannot read."""
    keeps_own = not cluster.traits.shares_files and not cluster.shared_fs
    return keeps_own and launch.node_range[1] > 1


def check_disks(
    launch: Launch, cluster: Cluster, machines: Machines, resolved: Resolved
) -> Iterator[Finding]:
    """Check that every host can write whole checkpoints to its own disk."""
    layout, per_node = resolved.layout, machines.per_node
    if (
        launch.entrypoint == "trainer"
        and has_private_disks(launch, cluster)
        and not layout.has_whole_replicas(per_node)
    ):
        ranks = layout.pp * layout.sharding * layout.mp
        message = (
            f"a replica has {ranks} ranks (mp × sharding × pp), but a host has {per_node}: "
            "checkpoints would be split across hosts"
        )
        # The hint lists layouts of the same world size that do fit.
        whole = propose(layout, machines, True, lambda other: other.has_whole_replicas(per_node))
        hint = "if run_root is a folder that all hosts share, set shared_fs: true in the profile; "
        hint += f"without it these layouts work: {'; '.join(map(str, whole))}"
        yield DISKS.found("Launch.cluster", cluster.name, message, hint)


def check_spread(machines: Machines, asked: int, reading: Reading) -> Iterator[Finding]:
    """Check that the ranks can be divided evenly, where nothing says how many GPUs a node has."""
    # Without dp_degree, the ranks per node were chosen so that the layout fits.
    if (
        DEGREE_KEYS["dp"] in reading.values and asked % machines.nodes
    ) or machines.per_node > MAX_PER_NODE:
        message = (
            f"{asked:,} ranks (mp × sharding × pp × dp) do not fit evenly on "
            f"{count(machines.nodes, 'node')}"
        )
        hint = "set gpus_per_node, or change nodes or degrees"
        yield WORLD.found("Launch.nodes", machines.nodes, message, hint)
