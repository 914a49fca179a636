"""What the facts of nodes mean: rows for the table. Pure; how the facts came here does not matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.doctor.rows import Row, ok, warning, wrong

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 10)
LITTLE_SPACE, NO_SPACE = 10 << 30, 1 << 30
SMALL_SKEW, LARGE_SKEW = 2.0, 60.0  # seconds
ENVIRONMENT = "see `python`, `setup` and `container` in the profile"


class Promised(NamedTuple):
    """What the profile promises of a node."""

    gpus: int  # 0: none are promised
    ranks: int
    several: bool  # machines, so that the network matters


class Sighting(NamedTuple):
    """When the facts of a node came, by the clock of this machine."""

    earliest: float  # they were certainly not written before
    missing: float  # they were not yet here
    seen: float


class NodeFacts(NamedTuple):
    """What a node left in the folder."""

    name: str
    facts: Mapping[str, Any] | None = None
    unseen: str = ""  # why it could not write into the folder
    failed: str = ""  # `check: reason`, where it came to an end before it could say more
    said: str = ""  # the end of its output
    sighting: Sighting | None = None


def judge_nodes(nodes: Sequence[NodeFacts], wanted: Promised) -> list[Row]:
    rows = [row for node in nodes for row in _judge(node, wanted)]
    order = list(dict.fromkeys(row.check for row in rows))
    rows.sort(key=lambda row: order.index(row.check))
    return [*rows, *_compared(nodes)] if len(nodes) > 1 else rows


def _judge(node: NodeFacts, wanted: Promised) -> Iterator[Row]:
    facts = node.facts
    if node.unseen:
        yield wrong(
            "run_root",
            node.unseen,
            "it must be one folder that every node sees and may write to",
            node.name,
        )
        return
    if facts is None:
        yield _silent(node)
        return
    yield ok("run_root", "visible, writable", node.name)
    yield _space(node.name, facts["free"])
    yield _python(node.name, facts)
    yield from _libraries(node, facts, wanted)
    yield _cores(node.name, facts["cores"], wanted)
    if wanted.several:
        yield _network(node.name, facts)
        yield _own_name(node.name, facts)
    if node.sighting:
        yield judge_clock(node.name, facts["clock"], node.sighting)


def _silent(node: NodeFacts) -> Row:
    check, _, reason = node.failed.partition(": ")
    if not node.failed:
        said = f"; its last words: {node.said}" if node.said else ""
        return wrong(
            "node",
            f"it told nothing{said}",
            "gptctl doctor once more; then ask those who run the cluster",
            node.name,
        )
    fixes = {
        "setup": "try that line of the profile's `setup` in a shell on the node",
        "python": ENVIRONMENT,
        "working folder": "start gptctl in a folder that every node sees",
    }
    said = f"; {node.said}" if check == "setup" and node.said else ""
    return wrong(check, f"{reason}{said}", fixes.get(check, ENVIRONMENT), node.name)


def _space(name: str, free: int) -> Row:
    found = f"{free / (1 << 30):,.1f} GiB free in run_root"
    if free >= LITTLE_SPACE:
        return ok("free space", found, name)
    row = wrong if free < NO_SPACE else warning
    return row("free space", found, "make room: checkpoints and logs are written there", name)


def _python(name: str, facts: Mapping[str, Any]) -> Row:
    found = f"{facts['version']}, {facts['python']}"
    if numbers(facts["version"]) < OLDEST_PYTHON:
        return wrong(
            "python",
            found,
            f"the trainer needs Python {dotted(OLDEST_PYTHON)} or newer; {ENVIRONMENT}",
            name,
        )
    return ok("python", found, name)


def _libraries(node: NodeFacts, facts: Mapping[str, Any], wanted: Promised) -> Iterator[Row]:
    if "error" in facts:
        yield wrong(
            "torch", facts["error"], f"pip install torch numpy there; {ENVIRONMENT}", node.name
        )
        return
    if "gpus" not in facts:
        said = f"; its last words: {node.said}" if node.said else ""
        yield wrong("torch", f"importing it did not come to an end{said}", ENVIRONMENT, node.name)
        return
    found = f"{facts['torch']}, numpy {facts['numpy']}"
    if numbers(facts["torch"]) < OLDEST_TORCH:
        yield warning(
            "torch", found, f"tested with torch {dotted(OLDEST_TORCH)} and newer", node.name
        )
    else:
        yield ok("torch", found, node.name)
    yield _gpus(node.name, facts["gpus"], wanted)


def _gpus(name: str, seen: Sequence[str], wanted: Promised) -> Row:
    kinds = ", ".join(dict.fromkeys(seen))
    found = f"torch sees {len(seen)}{f' ({kinds})' if kinds else ''}"
    if len(seen) >= wanted.gpus:
        return ok(
            "GPUs", found if seen or wanted.gpus else "none: jobs need Global.device: cpu", name
        )
    fix = "is torch built for CUDA, is the driver there (nvidia-smi), does the job get its GPUs?"
    if not seen:
        fix += " For jobs without GPUs: gpu_request: none"
    return wrong("GPUs", f"{found}, a job asks for {wanted.gpus} (gpus_per_node)", fix, name)


def _cores(name: str, cores: int, wanted: Promised) -> Row:
    if cores >= wanted.ranks:
        return ok("cores", str(cores), name)
    fix = "raise cpus_per_task in the profile: each rank needs at least one"
    return warning("cores", f"{cores} for {wanted.ranks} ranks", fix, name)


def _network(name: str, facts: Mapping[str, Any]) -> Row:
    interface, address = facts["interface"], facts["address"]
    if not interface:
        fix = "is `ip` (iproute2) installed there? Or set `interface` of the ssh host, or GLOO_SOCKET_IFNAME in env"
        return wrong("network", f"no interface leads to node 0 at {facts['head']}", fix, name)
    if not address:
        fix = "let `interface` of the ssh host, or GLOO_ and NCCL_SOCKET_IFNAME in env, name one that it has"
        return wrong(
            "network", f"there is no interface {interface}, or it has no IPv4 address", fix, name
        )
    if address.startswith("127."):
        fix = "ranks on other nodes cannot reach it: choose another `interface`, or GLOO_SOCKET_IFNAME"
        return wrong("network", f"{interface} has the loopback address {address}", fix, name)
    return ok("network", f"{interface}, {address}", name)


def _own_name(name: str, facts: Mapping[str, Any]) -> Row:
    addresses = facts["own_name"]
    if not addresses:
        fix = "gptctl does without; NCCL and others may not: put the name into /etc/hosts or DNS"
        return warning("own name", f"{facts['host']} is not resolved", fix, name)
    found = f"{facts['host']} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        fix = "gptctl does without; other programs may not: give the name its real address in /etc/hosts"
        return warning("own name", f"{found}: loopback", fix, name)
    return ok("own name", found, name)


def judge_clock(name: str, clock: float, sighting: Sighting) -> Row:
    """A file may arrive late, so that only what is outside of all doubt is wrong."""
    ahead, behind = clock - sighting.seen, sighting.earliest - clock
    fix = "let chrony or ntpd set the clock of each machine"
    if max(ahead, behind) > SMALL_SKEW:
        row = wrong if max(ahead, behind) > LARGE_SKEW else warning
        found = (
            f"{max(ahead, behind):.0f} s {'ahead of' if ahead > behind else 'behind'} this machine"
        )
        return row("clock", found, fix, name)
    if sighting.missing - clock > SMALL_SKEW:
        found = f"{sighting.missing - clock:.0f} s behind this machine, or files of nodes arrive here so late"
        return warning("clock", found, f"{fix}; with late files logs come late", name)
    return ok("clock", "as here, as far as can be told", name)


def judge_port(name: str, facts: Mapping[str, Any]) -> Row:
    """Of the first host, where ranks meet."""
    if not facts["port"]:
        return wrong(
            "port", "none is free for ranks to meet", "end what listens on all of them", name
        )
    words = f"{facts['port']} is free for ranks to meet"
    return ok("port", words, name)


def _compared(nodes: Sequence[NodeFacts]) -> Iterator[Row]:
    told = [node for node in nodes if node.facts]
    for check, key in (("same python", "version"), ("same torch", "torch")):
        names: dict[str, list[str]] = {}
        for node in told:
            if node.facts and key in node.facts:
                names.setdefault(node.facts[key], []).append(node.name)
        if len(names) > 1:
            found = "; ".join(
                f"{version} on {', '.join(those)}" for version, those in names.items()
            )
            yield wrong(check, found, f"all ranks need the same: {ENVIRONMENT}")
        elif sum(map(len, names.values())) > 1:
            yield ok(check, f"{next(iter(names))} on all nodes")


def judge_reduce(measured: Mapping[str, Any], nodes: Sequence[str]) -> list[Row]:
    """Bandwidth of the busiest link: in a ring each rank sends 2 (n - 1) / n of the message."""
    world, size = measured["world"], measured["bytes"]
    rate = 2 * (world - 1) / world * size / measured["seconds"] / 1e9
    found = (
        f"{rate:.2f} GB/s over {world} ranks with {measured['backend']} ({size >> 20} MB in "
        f"{duration(measured['seconds'])}); the smallest message takes {duration(measured['smallest'])}"
    )
    if not measured["is_right"]:
        return [
            wrong(
                "all-reduce",
                f"its sum is wrong; {found}",
                "set NCCL_DEBUG=INFO and look for a broken link or GPU",
            )
        ]
    return [ok("all-reduce", found), *_clocks(dict(measured["clocks"]), nodes)]


def _clocks(clocks: Mapping[int, float], nodes: Sequence[str]) -> Iterator[Row]:
    """Of nodes that were at the same place at the same time."""
    if len(clocks) < 2:
        return
    first, last = (choose(clocks, key=lambda number: clocks[number]) for choose in (min, max))
    skew = clocks[last] - clocks[first]
    names = {
        number: nodes[number] if number < len(nodes) else f"node {number}" for number in clocks
    }
    if skew <= SMALL_SKEW:
        yield ok("same clock", f"within {duration(max(skew, 1e-3))}")
        return
    row = wrong if skew > LARGE_SKEW else warning
    found = f"{names[last]} is {skew:.0f} s ahead of {names[first]}"
    yield row("same clock", found, "let chrony or ntpd set the clock of each machine")


def judge_no_reduce(failed: str, is_possible: bool) -> Row:
    if not is_possible:
        return Row(
            "all-reduce",
            "",
            "notice",
            "not tried",
            "it is when every node has python, torch and numpy",
        )
    fix = "can the nodes reach each other on all ports? NCCL_DEBUG=INFO in the profile's env says more"
    return wrong("all-reduce", failed or "it did not come to an end", fix)


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0a0+git` as (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
