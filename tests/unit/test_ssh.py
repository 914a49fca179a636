"""How a host is reached: the profile, and the user's ssh config field by field. Oracle: what OpenSSH's manual says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptctl.remote.answers import is_answer, is_commit
from gptctl.remote.connection import routes
from gptctl.spec.cluster import Cluster, Host
from trainer.errors import OUT_OF_REACH, UserError

CONFIG = """
Host gpu*
  User trainee
  IdentityFile ~/.ssh/id_gpu
  UserKnownHostsFile ~/.ssh/gpus ~/.ssh/more
Host gpu1
  HostName 10.0.0.1
  Port 2201
  ProxyJump me@bastion:2200,second
Host bastion
  HostName 192.0.2.7
Host odd
  ProxyCommand nc %h %p
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(CONFIG)
    return lambda *hosts, **keys: Cluster(kind="ssh", hosts=tuple(hosts), **keys)


def fault(cluster: Cluster) -> str:
    with pytest.raises(UserError) as caught:
        routes(cluster)
    assert caught.value.exit_code == OUT_OF_REACH
    return "; ".join(f"{found.key}: {found.message}" for found in caught.value.findings)


def test_the_ssh_config_is_honoured(cluster: Any, tmp_path: Path) -> None:
    (route,) = routes(cluster(Host(host="gpu1")))
    assert (route.name, route.host, route.port, route.user) == ("gpu1", "10.0.0.1", 2201, "trainee")
    assert route.keys == (f"{tmp_path}/.ssh/id_gpu",)
    assert route.known_hosts == (f"{tmp_path}/.ssh/gpus", f"{tmp_path}/.ssh/more")
    assert route.jumps[0][1:4] == ("192.0.2.7", 2200, "me")
    assert [hop.host for hop in route.jumps] == ["192.0.2.7", "second"]


def test_the_profile_wins(cluster: Any, tmp_path: Path) -> None:
    key = str(tmp_path / ".ssh" / "config")  # any file will do
    host = Host(host="gpu1", user="root", port=22, proxy_jump="other", identity_file=key)
    (route,) = routes(cluster(host, known_hosts="/pinned", identity_file=key))
    assert (route.port, route.user, route.keys, route.known_hosts) == (22, "root", (key,), ("/pinned",))
    assert [hop.host for hop in route.jumps] == ["other"]


def test_a_proxy_command_runs_only_when_it_is_allowed(cluster: Any) -> None:
    assert "ProxyCommand" in fault(cluster(Host(host="odd")))
    (route,) = routes(cluster(Host(host="odd"), allow_proxy_command=True))
    assert route.command == "nc odd 22"
    (route,) = routes(cluster(Host(host="odd", proxy_jump="bastion")))
    assert route.command == ""


def test_what_cannot_be_used_is_said_of_its_host(cluster: Any, tmp_path: Path) -> None:
    assert fault(cluster(Host(host="a"), Host(host="b"), identity_file="/no/key")) == (
        "a: the key /no/key cannot be read; b: the key /no/key cannot be read"
    )
    (tmp_path / ".ssh" / "config").write_text("Host a\n  Port ssh\n")
    assert fault(cluster(Host(host="a"))) == "a: invalid port: ssh"
    (tmp_path / ".ssh" / "config").write_text('UserKnownHostsFile "/a b\n')
    assert "No closing quotation" in fault(cluster(Host(host="a")))
    (tmp_path / ".ssh" / "config").write_text("nonsense\n")
    with pytest.raises(UserError, match="cannot be read"):
        routes(cluster(Host(host="a")))


def test_without_a_config_there_are_defaults(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / ".ssh" / "config").unlink()
    (route,) = routes(cluster(Host(host="10.0.0.9")))
    assert (route.host, route.port, route.jumps, route.keys) == ("10.0.0.9", 22, (), ())
    assert route.known_hosts == (f"{tmp_path}/.ssh/known_hosts",)


STATUS = {"claim": None, "agents": [], "processes": 0, "boot": "b", "result": None}
PROCESS = {"pid": 1, "started": 2, "boot": "b", "host": "h"}


@pytest.mark.parametrize(
    ("command", "valid", "changes"),
    [
        ("status", STATUS, [{"agents": 1}, {"processes": "1"}, {"boot": 1}]),
        ("status", {**STATUS, "result": ["FAILED", "why", 1.0]}, [{"result": "COMPLETED"}, {"result": []}]),
        ("status", STATUS, [{"result": ["WHATEVER", ""]}, {"result": ["FAILED", {}]}, {"result": [["FAILED"], ""]}]),
        ("end", {"left": [5]}, [{"left": "x"}, {"left": None}]),
        ("abandon", {"claim": {"abandoned": True}}, [{"claim": None}, {"claim": {}}, {"claim": []}]),
        ("abandon", {"claim": PROCESS}, [{"claim": {**PROCESS, "host": 5}}]),
    ],
)
def test_only_a_valid_answer_of_a_host_is_used(
    command: str, valid: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    """Oracle: what `engine/host_commands.py` prints."""
    assert is_answer(command, valid)
    for wrong in ({}, *({**valid, **change} for change in changes)):
        assert not is_answer(command, wrong), wrong


def test_only_a_valid_commit_is_used() -> None:
    valid = {"committed": PROCESS, "endpoint": ["h", 29500]}
    assert is_commit(valid)
    for change in (
        {"committed": True},
        {"committed": {}},
        {"endpoint": None},
        {"endpoint": ["h"]},
        {"endpoint": [1, 2]},
    ):
        assert not is_commit({**valid, **change}), change
