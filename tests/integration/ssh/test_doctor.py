"""`gptctl doctor` on ssh hosts, well and ill. Oracles: what the lab made of them, and what is left there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk


def look(desk: Desk, exit_code: int, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    desk.on("ssh2", f"mkdir -p {desk.run_root}")
    done = desk.run("doctor", "--cluster", "hosts", "--json", *options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    for host in HOSTS:
        assert desk.left(host) == []
        left = desk.on(host, f"ls -a {desk.run_root} 2> /dev/null").split()
        assert left == ([".", ".."] if host == "ssh2" else []), "it leaves what it found, and nothing else"
    return {(row["check"], row["node"] or ""): row for row in json.loads(done.stdout)}


@pytest.mark.long
def test_all_is_well(desk: Desk) -> None:
    """On a host that is reached directly, and on one behind a bastion."""
    used = {host: ADDRESSES[host] for host in ("ssh1", "private1")}
    hosts = [{"host": host, "address": address, "proxy_jump": "bastion"} for host, address in used.items()]
    del hosts[0]["proxy_jump"]
    desk.write_profile("hosts", hosts=hosts)
    rows = look(desk, 0)
    for host in used:
        for check in ("ssh", "run_root", "free space", "python", "torch", "GPUs", "network", "clock"):
            assert rows[check, host]["state"] == "ok", rows[check, host]
        assert ADDRESSES[host] in rows["network", host]["found"]
    assert rows["port", "ssh1"]["state"] == "ok"
    assert rows["all-reduce", ""]["found"].count("over 2 ranks with gloo") == 1
    for check in ("same python", "same torch", "same clock"):
        assert rows[check, ""]["state"] == "ok"


def test_what_is_wrong_is_told_of_each_host(desk: Desk) -> None:
    """No way to one, no Python on another, no such interface on the third; the rest is looked at all the same."""
    desk.on("ssh1", "cp -s /usr/bin/python3 ~/own-python-of-doctor")
    hosts: list[dict[str, object]] = [{"host": host, "address": ADDRESSES[host]} for host in HOSTS]
    hosts[0]["interface"] = "eth9"
    hosts[2] |= {"proxy_jump": "bastion", "port": 3}
    desk.write_profile("hosts", hosts=hosts, python="/home/gpt/own-python-of-doctor")
    rows = look(desk, 1)
    assert "there is no interface eth9" in rows["network", "ssh1"]["found"]
    assert "there is no /home/gpt/own-python-of-doctor" in rows["python", "ssh2"]["found"]
    assert rows["ssh", "ssh2"]["state"] == "ok"
    assert rows["ssh", "private1"]["state"] == "wrong"
    assert {check for check, node in rows if node == "private1"} == {"ssh"}
    assert rows["all-reduce", ""]["state"] == "notice"
    assert look(desk, 1, "--nodes", "4")["nodes", ""]["state"] == "wrong"


def test_no_host_is_in_reach(desk: Desk) -> None:
    desk.write_profile("hosts", known_hosts="/dev/null")
    rows = look(desk, 3)
    assert "its host key is not known" in rows["ssh", "ssh1"]["found"]
    assert "hosts trust" in rows["ssh", "ssh1"]["fix"]


@pytest.mark.long
def test_a_shared_folder_is_looked_at_once(desk: Desk) -> None:
    """Where hosts share run_root, and where the profile is wrong about that, either way."""
    shared = f"{desk.lab.folder}/tmp/{desk.folder.name}"
    desk.write_profile("hosts", shared_fs=True, run_root=shared)
    done = desk.run("doctor", "--cluster", "hosts", "--json", "--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert desk.on("ssh1", f"ls -a {shared}").split() == []
    desk.write_profile("hosts", run_root=shared)
    done = desk.run("doctor", "--cluster", "hosts", "--nodes", "2")
    assert "is one folder that hosts share: set shared_fs: true" in done.stdout, done.stdout
    desk.write_profile("hosts", shared_fs=True)
    done = desk.run("doctor", "--cluster", "hosts", "--nodes", "2")
    assert done.returncode == 1
    assert "is not visible here, although the profile has shared_fs: true" in done.stdout, done.stdout
