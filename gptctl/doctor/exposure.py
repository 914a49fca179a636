"""Who can connect to a job's ranks, and the firewall lines that keep others out. Pure.

torch's rendezvous store and collectives let in whoever connects. What nodes say about themselves is
not trusted: the lines are meant to be pasted into a root shell, and have only parsed addresses.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gptctl.doctor.rows import Row, notice, ok, warning
from gptctl.engine.ports import PORTS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

CHECK, FIREWALL = "rendezvous", "firewall"
LINUX_PORTS = (32768, 60999)  # from which Linux takes ports that nobody asked for, unless changed
CLOSE_IT = (
    "close the ports of jobs to other machines: see `firewall` for several hosts, and "
    "docs/security.md; or ask for nodes without a public address"
)


class Openings(NamedTuple):
    """What a firewall has to know: the hosts of jobs, and ports as (first, last)."""

    hosts: tuple[Address, ...]
    ports: tuple[tuple[int, int], ...]


def listening_row(name: str, facts: Mapping[str, Any], is_first: bool = True) -> Row | None:
    """On which addresses of the node a rendezvous store listens; None if it could not be tried."""
    if not (listens := _parsed(facts.get("listens"))):
        return None
    is_everywhere = any(each.is_unspecified for each in listens)
    reached = [each for each in (_addresses(facts) if is_everywhere else listens) if _is_out(each)]
    if not is_first:
        return _other_node_row(name, reached, is_everywhere)
    # With the static rendezvous gptctl gives torch a socket of this address, unless it is a name.
    head = _parsed([facts.get("head")])
    bound = [each for each in head if _is_out(each)] if head else reached
    if public := _public(bound):
        found = f"torch's store listens also on the public {_listed(public)}"
        return warning(CHECK, found, CLOSE_IT, name)
    if not head or not is_everywhere:
        return ok(CHECK, f"torch's store {_where(bound, is_everywhere)}", name)
    where = _where(bound, False)
    found = f"torch's store {where}; with c10d and standalone on all addresses: {_listed(reached)}"
    if _public(reached):
        return notice(CHECK, found, f"use the static rendezvous, or {CLOSE_IT}", name)
    return ok(CHECK, found, name)


def _other_node_row(name: str, reached: Sequence[Address], is_everywhere: bool) -> Row:
    """For a node that is not the first: only c10d may start a store there."""
    where = _where(reached, is_everywhere)
    found = f"no store with the static rendezvous: it runs on the first host; with c10d it {where}"
    if _public(reached):
        return notice(CHECK, found, f"use the static rendezvous, or {CLOSE_IT}", name)
    return ok(CHECK, found, name)


def _where(addresses: Sequence[Address], is_everywhere: bool) -> str:
    if not addresses:
        return "can be reached from this machine only"
    return f"listens on {'all addresses: ' if is_everywhere else ''}{_listed(addresses)}"


def _is_out(address: Address) -> bool:
    return not address.is_loopback


def _public(addresses: Iterable[Address]) -> list[Address]:
    return [each for each in addresses if each.is_global]


def firewall_row(nodes: Sequence[Mapping[str, Any]], missing: Sequence[str] = ()) -> Row | None:
    """The lines for all hosts of a job; None if there are not several.

    `missing` are the hosts of the profile whose addresses are unknown.
    """
    # Lines without these hosts would lock them out.
    if missing and nodes:
        found = f"no lines: the addresses of {_listed(missing)} are unknown"
        return notice(FIREWALL, found, "run doctor on all of them: use --nodes if they all answer")
    if len(nodes) < 2 or not (openings := openings_of(nodes)).hosts:
        return None
    ports = _listed(f"{first}-{last}" for first, last in openings.ports)
    found = f"lines that close ports {ports} to all but {_listed(openings.hosts)}"
    return Row(FIREWALL, "", "ok", found, "\n".join(firewall_lines(openings)))


def openings_of(nodes: Sequence[Mapping[str, Any]]) -> Openings:
    """The addresses of the nodes, and the ports that ranks listen on."""
    own = [dict.fromkeys(_addresses(facts)) for facts in nodes]
    # An address that several nodes have is one of a bridge for containers, not of the network.
    counts = Counter(each for addresses in own for each in addresses)
    hosts = [each for each, number in counts.items() if number == 1 and _is_of_network(each)]
    chosen = (PORTS.start, PORTS.stop - 1)
    ranges = [_range(facts.get("ports")) for facts in nodes]
    given = (min(first for first, _ in ranges), max(last for _, last in ranges))
    return Openings(tuple(hosts), merged_ranges([chosen, given]))


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that overlap or touch become one: nft refuses a set with overlaps."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def firewall_lines(openings: Openings) -> list[str]:
    return [
        "# They drop connections from all other machines: add the addresses of those that need",
        "# these ports, such as the controller and the login hosts of Slurm.",
        "# As root on each of these hosts, with nft:",
        *_nft_lines(openings),
        "# or with iptables:",
        *_iptables_lines("iptables", 4, openings),
        # torch listens on IPv6 too, even if no host has such an address in the training network.
        *_iptables_lines("ip6tables", 6, openings),
    ]


def _nft_lines(openings: Openings) -> list[str]:
    add = "nft add rule inet gptctl input"
    ports = f"'{{ {_listed(f'{first}-{last}' for first, last in openings.ports)} }}'"
    hosts = [
        f"{add} {'ip' if version == 4 else 'ip6'} saddr '{{ {_listed(own)} }}' accept"
        for version in (4, 6)
        if (own := [each for each in openings.hosts if each.version == version])
    ]
    return [
        "nft add table inet gptctl",
        "nft add chain inet gptctl input '{ type filter hook input priority 0; policy accept; }'",
        f"{add} iif lo accept",
        f"{add} ct state established,related accept",
        *hosts,
        f"{add} tcp dport {ports} drop",
    ]


def _iptables_lines(program: str, version: int, openings: Openings) -> list[str]:
    ports = ",".join(f"{first}:{last}" for first, last in openings.ports)
    hosts = [each for each in openings.hosts if each.version == version]
    return [
        f"{program} -N GPTCTL",
        f"{program} -A GPTCTL -i lo -j RETURN",
        f"{program} -A GPTCTL -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN",
        *(f"{program} -A GPTCTL -s {host} -j RETURN" for host in hosts),
        f"{program} -A GPTCTL -j DROP",
        f"{program} -I INPUT -p tcp -m multiport --dports {ports} -j GPTCTL",
    ]


def _addresses(facts: Mapping[str, Any]) -> list[Address]:
    interfaces = facts.get("interfaces")
    first = list(interfaces.values()) if isinstance(interfaces, dict) else []
    more = facts.get("addresses6")
    return _parsed([*first, *(more if isinstance(more, list) else [])])


def _parsed(texts: Any) -> list[Address]:
    found: list[Address] = []
    for text in texts if isinstance(texts, list) else ():
        try:
            found += [ipaddress.ip_address(text)] if isinstance(text, str) else []
        except ValueError:  # an interface without an address has an empty text
            continue
    return found


def _is_of_network(address: Address) -> bool:
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _range(value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if is_pair and all(type(each) is int and 0 < each < 1 << 16 for each in value):
        return (min(value), max(value))
    return LINUX_PORTS


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
