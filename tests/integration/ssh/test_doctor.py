"""`gptctl doctor` on ssh hosts, with and without problems. Oracles: how the lab set them up, and what is left there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk


def diagnose(desk: Desk, exit_code: int, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    desk.on("ssh2", f"mkdir -p {desk.run_root}")
    done = desk.run("doctor", "--cluster", "hosts", "--json", *options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    for host in HOSTS:
        assert desk.left(host) == []
        left = desk.on(host, f"ls -a {desk.run_root} 2> /dev/null").split()
        assert left == ([".", ".."] if host == "ssh2" else []), "it removes all that it created, and nothing else"
    return {(row["check"], row["node"] or ""): row for row in json.loads(done.stdout)}


@pytest.mark.long
def test_all_is_well(desk: Desk) -> None:
    """On a host that is reached directly, and on one behind a bastion."""
    used = {host: ADDRESSES[host] for host in ("ssh1", "private1")}
    hosts = [{"host": host, "address": address, "proxy_jump": "bastion"} for host, address in used.items()]
    del hosts[0]["proxy_jump"]
    desk.write_profile("hosts", hosts=hosts)
    rows = diagnose(desk, 0)
    for host in used:
        for check in ("ssh", "run_root", "free space", "python", "engine python", "torch", "GPUs", "network", "clock"):
            assert rows[check, host]["state"] == "ok", rows[check, host]
        assert ADDRESSES[host] in rows["network", host]["found"]
    assert "listens on " in rows["rendezvous", "ssh1"]["found"]
    assert "it runs on the first host" in rows["rendezvous", "private1"]["found"]
    lines = rows["firewall", ""]["fix"]
    assert all(f"iptables -A GPTCTL -s {address} -j RETURN" in lines for address in used.values())
    assert rows["port", "ssh1"]["state"] == "ok"
    assert rows["all-reduce", ""]["found"].count("over 2 ranks with gloo") == 1
    for check in ("same python", "same torch", "same clock"):
        assert rows[check, ""]["state"] == "ok"


def test_problems_are_reported_for_each_host(desk: Desk) -> None:
    """One cannot be reached, one has no Python, one has no such interface; everything else is still checked."""
    desk.on("ssh1", "cp -s /usr/bin/python3 ~/own-python-of-doctor")
    hosts: list[dict[str, object]] = [{"host": host, "address": ADDRESSES[host]} for host in HOSTS]
    hosts[0]["interface"] = "eth9"
    hosts[2] |= {"proxy_jump": "bastion", "port": 3}
    desk.write_profile("hosts", hosts=hosts, python="/home/gpt/own-python-of-doctor")
    rows = diagnose(desk, 1)
    assert "interface eth9 does not exist" in rows["network", "ssh1"]["found"]
    assert "/home/gpt/own-python-of-doctor does not exist" in rows["python", "ssh2"]["found"]
    assert rows["engine python", "ssh1"]["state"] == "ok"
    assert rows["engine python", "ssh2"]["found"] == "/home/gpt/own-python-of-doctor does not exist"
    assert rows["engine python", "ssh2"]["fix"] == "set engine_python in the profile"
    assert rows["ssh", "ssh2"]["state"] == "ok"
    assert rows["ssh", "private1"]["state"] == "wrong"
    assert {check for check, node in rows if node == "private1"} == {"ssh"}
    assert rows["all-reduce", ""]["state"] == "notice"
    assert diagnose(desk, 1, "--nodes", "4")["nodes", ""]["state"] == "wrong"


def test_no_host_is_in_reach(desk: Desk) -> None:
    desk.write_profile("hosts", known_hosts="/dev/null")
    rows = diagnose(desk, 3)
    assert "its host key is not in" in rows["ssh", "ssh1"]["found"]
    assert "hosts trust" in rows["ssh", "ssh1"]["fix"]


@pytest.mark.long
def test_a_shared_folder_is_created_once(desk: Desk) -> None:
    """If hosts share run_root, and if the profile is wrong about that, either way."""
    shared = f"{desk.lab.folder}/tmp/{desk.folder.name}"
    desk.write_profile("hosts", shared_fs=True, run_root=shared)
    done = desk.run("doctor", "--cluster", "hosts", "--json", "--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert desk.on("ssh1", f"ls -a {shared}").split() == []
    desk.write_profile("hosts", run_root=shared)
    done = desk.run("doctor", "--cluster", "hosts", "--nodes", "2")
    assert f"{shared} is shared by several hosts" in done.stdout, done.stdout
    assert "set shared_fs: true in the profile" in done.stdout
    desk.write_profile("hosts", shared_fs=True)
    done = desk.run("doctor", "--cluster", "hosts", "--nodes", "2")
    assert done.returncode == 1
    assert "is not visible here, although the profile has shared_fs: true" in done.stdout, done.stdout
