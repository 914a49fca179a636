"""Where a job can be reached, and the lines that close it. Oracles: addresses judged by hand, and the programs themselves
where they are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from ipaddress import ip_address
from typing import Any

import pytest

from gptctl.doctor.exposure import Openings, firewall_lines, firewall_row, listening_row, merged_ranges, openings_of
from gptctl.engine.ports import PORTS
from trainer.node_check import listening_addresses, port_range, store_addresses


def node(address: str, listens: str = "::", **more: Any) -> dict[str, Any]:
    interfaces = {"lo": "127.0.0.1", "eth0": address, "docker0": "172.17.0.1", "ib1": ""}
    return {"listens": [listens], "interfaces": interfaces, "addresses6": ["::1", "fe80::1"], **more}


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (node("10.0.0.5"), "ok", "listens on all addresses: 10.0.0.5, 172.17.0.1"),
        (node("8.8.4.4"), "warning", "also on the public 8.8.4.4"),
        (node("8.8.4.4", "0.0.0.0"), "warning", "public 8.8.4.4"),
        (node("10.0.0.5", addresses6=["2a00:1450:4001::1"]), "warning", "public 2a00:1450:4001::1"),
        (node("8.8.4.4", "10.0.0.5"), "ok", "listens on 10.0.0.5"),
        (node("8.8.4.4", "127.0.0.1"), "ok", "from this machine only"),
        # With an address as MASTER_ADDR, gptctl binds the store of the static rendezvous to it.
        (node("10.0.0.5", head="10.0.0.5"), "ok", "listens on 10.0.0.5; with c10d and standalone on all"),
        (node("10.0.0.5", head="node1"), "ok", "listens on all addresses: 10.0.0.5"),
        (node("8.8.4.4", head="127.0.0.1"), "notice", "this machine only; with c10d and standalone on all"),
        (node("8.8.4.4", head="8.8.4.4"), "warning", "public 8.8.4.4"),
    ],
)
def test_where_a_store_listens(facts: dict[str, Any], state: str, words: str) -> None:
    row = listening_row("n1", facts)
    assert row is not None
    assert (row.state, words in row.found) == (state, True), row
    assert bool(row.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (node("10.0.0.6", head="10.0.0.5"), "ok", "with c10d it listens on all addresses: 10.0.0.6, 172.17.0.1"),
        (node("8.8.4.4", head="10.0.0.5"), "notice", "with c10d it listens on all addresses: 8.8.4.4, 172.17.0.1"),
        (node("8.8.4.4", head="8.8.8.8"), "notice", "with c10d it listens on all addresses: 8.8.4.4, 172.17.0.1"),
        (node("8.8.4.4", "127.0.0.1", head="node1"), "ok", "with c10d it can be reached from this machine only"),
        (node("8.8.4.4", "10.0.0.6", head="node1"), "ok", "with c10d it listens on 10.0.0.6"),
    ],
)
def test_the_store_of_the_static_rendezvous_runs_on_the_first_host_only(facts, state: str, words: str) -> None:
    row = listening_row("n2", facts, is_first=False)
    assert row is not None
    assert (row.state, words in row.found) == (state, True), row
    assert row.found.startswith("no store with the static rendezvous: it runs on the first host;")


def test_a_node_without_torch_or_of_an_older_version_has_no_row() -> None:
    assert listening_row("n1", {"interfaces": {"lo": "127.0.0.1"}}) is None
    assert listening_row("n1", {"listens": 3, "interfaces": []}) is None


def test_where_a_program_listens_here() -> None:
    """Oracle: the socket that the test opens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert listening_addresses(server.getsockname()[1]) == ["127.0.0.1"]
    assert len(port_range()) == 2


def test_a_store_is_tried_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first node's address leads to another machine. Oracle: the kernel's list of sockets."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # reserved for documentation: nobody answers there
    assert store_addresses() in (["::"], ["0.0.0.0"])


NODES = [node("10.0.0.5", ports=[32768, 60999]), node("10.0.0.6", addresses6=["fd00::6"], ports=[40000, 65000])]


def test_the_firewall_of_several_hosts() -> None:
    """Not for bridges that every host has, nor loopback; one host needs no lines."""
    openings = openings_of(NODES)
    assert [*map(str, openings.hosts)] == ["10.0.0.5", "10.0.0.6", "fd00::6"]
    assert openings.ports == ((PORTS.start, PORTS.stop - 1), (32768, 65000))
    row = firewall_row(NODES)
    assert row is not None
    assert row.as_json()["fix"].splitlines() == firewall_lines(openings)
    assert firewall_row(NODES[:1]) is None


def test_hosts_that_did_not_answer_are_not_locked_out() -> None:
    """Not one line, however many answered; if nobody did, other rows say so."""
    for answered in (NODES, NODES[:1]):
        row = firewall_row(answered, ["n3", "n4"])
        assert row is not None
        assert (row.state, row.found) == ("notice", "no lines: the addresses of n3, n4 are unknown")
        assert row.fix == "run doctor on all of them: use --nodes if they all answer"
    assert firewall_row([], ["n1", "n2"]) is None


def test_what_a_hostile_node_says_does_not_reach_a_root_shell() -> None:
    hostile = node("10.0.0.7; reboot", addresses6=["$(reboot)", 7, None, ["::2"]], ports=["1; reboot", 2])
    row = firewall_row([*NODES, hostile])
    assert row is not None
    assert "reboot" not in row.fix
    for line in row.fix.splitlines():
        assert set(line) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_.,:;'{}#"), line


def test_ranges_that_touch_are_one() -> None:
    assert merged_ranges([(32000, 60000), (20000, 31999)]) == ((20000, 60000),)
    assert merged_ranges([(1, 2), (5, 9), (6, 7)]) == ((1, 2), (5, 9))


PROGRAMS = ("nft", "iptables", "ip6tables")
COMMANDS = [line for line in firewall_lines(openings_of(NODES)) if not line.startswith("#")]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_the_lines_are_accepted(program: str) -> None:
    """Oracle: the program itself, in a network namespace of its own."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    script = "set -e\n" + "\n".join(line for line in COMMANDS if line.startswith(f"{program} "))
    done = subprocess.run(["unshare", "-n", "bash", "-c", script], capture_output=True, text=True)
    if "not supported" in done.stderr.lower() or "table does not exist" in done.stderr.lower():
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def test_each_line_belongs_to_one_program() -> None:
    assert {line.split()[0] for line in COMMANDS} == set(PROGRAMS)
    only_v4 = firewall_lines(Openings((ip_address("10.0.0.5"),), ((20000, 31999),)))
    assert not any("ip6 saddr" in line for line in only_v4)
    assert any(line == "ip6tables -A GPTCTL -j DROP" for line in only_v4)
