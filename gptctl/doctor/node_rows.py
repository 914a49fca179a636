"""Turn the facts that nodes reported into rows. Pure; it does not know how the facts got here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.doctor.exposure import firewall_row, listening_row
from gptctl.doctor.rows import Row, notice, ok, warning, wrong
from gptctl.engine.ports import PORTS
from gptctl.spec.env_lint import Interfaces

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 10)
LITTLE_SPACE, NO_SPACE = 10 << 30, 1 << 30  # bytes
SMALL_SKEW, LARGE_SKEW = 2.0, 60.0  # seconds
CHECK_PROFILE = "check `python`, `setup` and `container` in the profile"
SYNCHRONIZE = "synchronize the clocks of all machines with chrony or ntpd"


class ExpectedNode(NamedTuple):
    """What a job of this profile needs of each node."""

    gpus: int  # 0: none
    ranks: int
    has_peers: bool  # other machines, so that the network matters


class Arrival(NamedTuple):
    """When the facts of a node arrived, by the clock of this machine."""

    not_before: float  # the node cannot have written them earlier
    absent_at: float  # the last time that they were not here yet
    seen_at: float


class NodeFacts(NamedTuple):
    """What a node left in the doctor's folder."""

    name: str
    facts: Mapping[str, Any] | None = None
    no_access: str = ""  # why it could not write to the folder
    failed: str = ""  # `check: reason`, if its script stopped early
    last_line: str = ""  # of its output
    arrival: Arrival | None = None


class EnginePython(NamedTuple):
    """The interpreter chosen for gptctl's engine on a node."""

    node: str
    path: str = ""
    version: str = ""
    failed: str = ""  # why there is none


def rows_for_nodes(
    nodes: Sequence[NodeFacts],
    engines: Sequence[EnginePython],
    expected: ExpectedNode,
    others: Sequence[str] = (),
) -> list[Row]:
    """The rows of all nodes. `others` are hosts of the profile that were not examined."""
    rows = [
        row
        for number, node in enumerate(nodes)
        for row in _rows_for_node(node, expected, is_first=number == 0)
    ]
    rows += map(engine_row, engines)
    # By check, not by node: equal rows of all nodes are then merged into one line.
    order = list(dict.fromkeys(row.check for row in rows))
    rows.sort(key=lambda row: order.index(row.check))
    if len(nodes) > 1:
        missing = [*(node.name for node in nodes if not node.facts), *others]
        closed = firewall_row([node.facts for node in nodes if node.facts], missing)
        rows += [closed] if closed else []
    return [*rows, *_same_versions(nodes)] if len(nodes) > 1 else rows


def _rows_for_node(node: NodeFacts, expected: ExpectedNode, is_first: bool) -> Iterator[Row]:
    facts = node.facts
    if node.no_access:
        fix = "run_root must be one folder that every node can see and write to"
        yield wrong("run_root", node.no_access, fix, node.name)
        return
    if facts is None:
        yield _no_facts_row(node)
        return
    # The node wrote its facts to the folder, so it can write there.
    yield ok("run_root", "exists and is writable", node.name)
    yield _space_row(node.name, facts["free"])
    yield _python_row(node.name, facts)
    yield from _library_rows(node, facts, expected)
    yield _cores_row(node.name, facts["cores"], expected)
    if expected.has_peers:
        yield _network_row(node.name, facts)
        yield _host_name_row(node.name, facts)
    if where := listening_row(node.name, facts, is_first):
        yield where
    # If it is the interface of Gloo, the row above is about it.
    nccl = facts["nccl"].strip()
    if nccl and not (expected.has_peers and nccl.removeprefix("=") == facts["interface"]):
        yield _nccl_row(node.name, nccl, facts["interfaces"], expected.has_peers)
    if node.arrival:
        yield clock_row(node.name, facts["clock"], node.arrival)


def _no_facts_row(node: NodeFacts) -> Row:
    check, _, reason = node.failed.partition(": ")
    if not node.failed:
        fix = "run gptctl doctor again; if this persists, ask your cluster administrators"
        return wrong("node", f"it reported nothing{_output_of(node)}", fix, node.name)
    fixes = {
        "setup": "run that line of the profile's `setup` in a shell on the node",
        "working folder": "run gptctl in a folder that every node can see",
    }
    # The shell's own message says why a line of the setup failed; ours only names the line.
    said = f"; {node.last_line}" if check == "setup" and node.last_line else ""
    return wrong(check, f"{reason}{said}", fixes.get(check, CHECK_PROFILE), node.name)


def _output_of(node: NodeFacts) -> str:
    return f"; last line of its output: {node.last_line}" if node.last_line else ""


def _space_row(name: str, free: int) -> Row:
    found = f"{free / (1 << 30):,.1f} GiB free in run_root"
    if free >= LITTLE_SPACE:
        return ok("free space", found, name)
    row = wrong if free < NO_SPACE else warning
    return row("free space", found, "free some space: checkpoints and logs are written there", name)


def _python_row(name: str, facts: Mapping[str, Any]) -> Row:
    found = f"{facts['version']}, {facts['python']}"
    if version_numbers(facts["version"]) < OLDEST_PYTHON:
        fix = f"the trainer needs Python {dotted(OLDEST_PYTHON)} or newer; {CHECK_PROFILE}"
        return wrong("python", found, fix, name)
    return ok("python", found, name)


def engine_row(engine: EnginePython) -> Row:
    """gptctl's engine runs outside the container, so its Python is not that of the ranks."""
    fix = "set engine_python in the profile"
    if engine.failed:
        return wrong("engine python", engine.failed, fix, engine.node)
    found = f"{engine.version}, {engine.path}"
    if version_numbers(engine.version) < OLDEST_PYTHON:
        needed = f"gptctl's engine needs Python {dotted(OLDEST_PYTHON)} or newer"
        return wrong("engine python", f"{found}: {needed}", fix, engine.node)
    return ok("engine python", found, engine.node)


def _library_rows(
    node: NodeFacts, facts: Mapping[str, Any], expected: ExpectedNode
) -> Iterator[Row]:
    if "error" in facts:
        fix = f"install them there (pip install torch numpy), or {CHECK_PROFILE}"
        yield wrong("torch", facts["error"], fix, node.name)
        return
    if "gpus" not in facts:  # these facts come second, after the import
        found = f"importing torch did not finish{_output_of(node)}"
        yield wrong("torch", found, CHECK_PROFILE, node.name)
        return
    found = f"{facts['torch']}, numpy {facts['numpy']}"
    if version_numbers(facts["torch"]) < OLDEST_TORCH:
        fix = f"use torch {dotted(OLDEST_TORCH)} or newer: gptctl is not tested with older ones"
        yield warning("torch", found, fix, node.name)
    else:
        yield ok("torch", found, node.name)
    yield _gpus_row(node.name, facts["gpus"], expected)


def _gpus_row(name: str, devices: Sequence[str], expected: ExpectedNode) -> Row:
    models = ", ".join(dict.fromkeys(devices))  # usually eight times the same one
    found = f"torch finds {len(devices)}{f' ({models})' if models else ''}"
    if not devices and not expected.gpus:
        return ok("GPUs", "none: jobs need Global.device: cpu", name)
    if len(devices) >= expected.gpus:
        return ok("GPUs", found, name)
    fix = (
        "check that torch is built for CUDA, that the driver works (nvidia-smi), and that the job "
        "gets its GPUs"
    )
    if not devices:
        fix += "; for jobs without GPUs set gpu_request: none"
    return wrong("GPUs", f"{found}, a job needs {expected.gpus} (gpus_per_node)", fix, name)


def _cores_row(name: str, cores: int, expected: ExpectedNode) -> Row:
    if cores >= expected.ranks:
        return ok("cores", str(cores), name)
    fix = "increase cpus_per_task in the profile: each rank needs at least one core"
    return warning("cores", f"{cores} for {expected.ranks} ranks", fix, name)


def _network_row(name: str, facts: Mapping[str, Any]) -> Row:
    interface, address = facts["interface"], facts["address"]
    if not interface:
        found = f"no interface has a route to node 0 at {facts['head']}"
        fix = (
            "install iproute2 (the command `ip`) there, or set `interface` of the ssh host, or "
            "GLOO_SOCKET_IFNAME in env"
        )
        return wrong("network", found, fix, name)
    if not address:
        found = f"interface {interface} does not exist or has no IPv4 address"
        fix = (
            "correct `interface` of the ssh host, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "in env"
        )
        return wrong("network", found, fix, name)
    if address.startswith("127."):
        found = f"{interface} has the loopback address {address}"
        fix = (
            "set `interface` of the ssh host, or GLOO_SOCKET_IFNAME in env, to one that other "
            "nodes can reach"
        )
        return wrong("network", found, fix, name)
    return ok("network", f"{interface}, {address}", name)


def _nccl_row(name: str, nccl: str, addresses: Mapping[str, str], has_peers: bool) -> Row:
    """Whether NCCL finds an interface: it stops if none has a name that it accepts."""
    listed = Interfaces.of(nccl)
    accepted = [interface for interface in addresses if listed.admit(interface)]
    fix = f"correct NCCL_SOCKET_IFNAME in env: this host has {', '.join(addresses)}"
    if not accepted:
        return wrong("NCCL network", f"no interface matches NCCL_SOCKET_IFNAME={nccl}", fix, name)
    usable = [interface for interface in accepted if addresses[interface]]
    if not usable:
        found = f"{', '.join(accepted)} (NCCL_SOCKET_IFNAME={nccl}) has no IPv4 address"
        return warning("NCCL network", found, "check that the interface is up", name)
    if has_peers and all(addresses[interface].startswith("127.") for interface in usable):
        found = f"NCCL_SOCKET_IFNAME={nccl} leaves only the loopback interface"
        return wrong("NCCL network", found, fix, name)
    found = ", ".join(f"{interface} {addresses[interface]}" for interface in usable)
    return ok("NCCL network", found, name)


def _host_name_row(name: str, facts: Mapping[str, Any]) -> Row:
    """Only a warning: gptctl gives ranks an address, but other programs look the name up."""
    addresses = facts["own_name"]
    if not addresses:
        fix = "gptctl does not need it, but NCCL may: add the name to /etc/hosts or DNS"
        return warning("host name", f"cannot resolve {facts['host']}", fix, name)
    found = f"{facts['host']} resolves to {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        fix = "gptctl does not need it, but NCCL may: set the real address in /etc/hosts"
        return warning("host name", f"{found}: loopback", fix, name)
    return ok("host name", found, name)


def clock_row(name: str, clock: float, arrival: Arrival) -> Row:
    """Compare a node's clock with this machine's. A file may arrive late: only what is certain
    is wrong."""
    ahead, behind = clock - arrival.seen_at, arrival.not_before - clock
    if max(ahead, behind) > SMALL_SKEW:
        row = wrong if max(ahead, behind) > LARGE_SKEW else warning
        direction = "ahead of" if ahead > behind else "behind"
        found = f"{max(ahead, behind):.0f} s {direction} this machine"
        return row("clock", found, SYNCHRONIZE, name)
    delay = arrival.absent_at - clock
    if delay > SMALL_SKEW:
        found = f"{delay:.0f} s behind this machine, or files take that long to arrive here"
        return warning("clock", found, f"{SYNCHRONIZE}; late files delay logs", name)
    return ok("clock", "matches this machine, as far as can be measured", name)


def port_row(name: str, facts: Mapping[str, Any]) -> Row:
    """For the first host: ranks connect to it."""
    if not facts["port"]:
        fix = f"stop programs that listen on ports {PORTS.start} to {PORTS.stop - 1}"
        return wrong("port", "no free port for the rendezvous", fix, name)
    return ok("port", f"{facts['port']} is free for the rendezvous", name)


def _same_versions(nodes: Sequence[NodeFacts]) -> Iterator[Row]:
    """Ranks with different versions may hang or compute different results."""
    for check, key in (("same python", "version"), ("same torch", "torch")):
        names: dict[str, list[str]] = {}
        for node in nodes:
            if node.facts and key in node.facts:
                names.setdefault(node.facts[key], []).append(node.name)
        if len(names) > 1:
            each = (f"{version} on {', '.join(those)}" for version, those in names.items())
            fix = f"use one version on all nodes: {CHECK_PROFILE}"
            yield wrong(check, "; ".join(each), fix)
        elif sum(map(len, names.values())) > 1:
            yield ok(check, f"{next(iter(names))} on all nodes")


def reduce_rows(measured: Mapping[str, Any], nodes: Sequence[str]) -> list[Row]:
    # The bandwidth of the busiest link: in a ring each rank sends 2 (n - 1) / n of the message.
    world, size = measured["world"], measured["bytes"]
    rate = 2 * (world - 1) / world * size / measured["seconds"] / 1e9
    found = (
        f"{rate:.2f} GB/s over {world} ranks with {measured['backend']} ({size >> 20} MiB in "
        f"{duration(measured['seconds'])}), latency {duration(measured['smallest'])}"
    )
    if not measured["is_right"]:
        fix = "set NCCL_DEBUG=INFO in the profile's env, and look for a broken link or GPU"
        return [wrong("all-reduce", f"the sum is wrong; {found}", fix)]
    return [ok("all-reduce", found), *_skew_rows(dict(measured["clocks"]), nodes)]


def _skew_rows(clocks: Mapping[int, float], nodes: Sequence[str]) -> Iterator[Row]:
    """Compare clocks that the nodes read right after the same barrier."""
    if len(clocks) < 2:
        return
    first, last = (choose(clocks, key=lambda number: clocks[number]) for choose in (min, max))
    skew = clocks[last] - clocks[first]
    if skew <= SMALL_SKEW:  # the barrier itself releases ranks within milliseconds
        yield ok("same clock", f"within {duration(max(skew, 1e-3))}")
        return
    row = wrong if skew > LARGE_SKEW else warning
    ahead, behind = (
        nodes[number] if number < len(nodes) else f"node {number}" for number in (last, first)
    )
    yield row("same clock", f"{ahead} is {skew:.0f} s ahead of {behind}", SYNCHRONIZE)


def failed_reduce_row(failed: str, is_possible: bool) -> Row:
    if not is_possible:
        fix = "fix the problems above: every node needs Python, torch and numpy for it"
        return notice("all-reduce", "not measured", fix)
    # Ranks connect to each other on ports of their choice: a firewall is the usual reason.
    fix = (
        "check that the nodes can connect to each other on all ports; NCCL_DEBUG=INFO in the "
        "profile's env shows more"
    )
    return wrong("all-reduce", failed or "it did not finish", fix)


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def version_numbers(version: str) -> tuple[int, ...]:
    """`2.13.0a0+git` as (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
