"""How hosts are reached: ssh config, agent, jump hosts, commands. Oracles: that jobs run there, and what sshd sees."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk, await_true


def own_home(desk: Desk, config: str, key: bool = True) -> str:
    """A home with this ssh config, the lab's key under another name, and no known hosts but in another file."""
    home = desk.folder / "user"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(config.format(home=home))
    (home / "known").write_text(desk.lab.known_hosts.read_text())
    if key:
        (home / "lab-key").write_text(desk.lab.key.read_text())
        (home / "lab-key").chmod(0o600)
    desk.lab.run("head", "chown", "-R", "gpt", str(home), check=True)
    return str(home)


CONFIG = """
Host one two three
  User gpt
  IdentityFile {home}/lab-key
  UserKnownHostsFile {home}/known
Host one
  HostName 10.77.0.51
Host two
  HostName ssh2
  ProxyCommand nc %h %p
Host three
  HostName private1
  Port 22
  ProxyJump gate
Host gate
  HostName bastion
  User gpt
  IdentityFile {home}/lab-key
  UserKnownHostsFile {home}/known
"""


def test_the_ssh_config_alone_leads_to_the_hosts(desk: Desk) -> None:
    """Names, user, key, known hosts and jump host come from there; its ProxyCommand runs only when the profile allows."""
    home = own_home(desk, CONFIG)
    hosts = [{"host": name, "address": ADDRESSES[host]} for name, host in zip(("one", "two", "three"), HOSTS)]
    desk.write_profile("quick", python=str(desk.stand_in), hosts=hosts)
    done = desk.run(*desk.quick(), HOME=home)
    assert done.returncode == 3
    assert "two: the ssh config runs a ProxyCommand for it: nc ssh2 22" in done.stderr
    desk.write_profile("quick", python=str(desk.stand_in), hosts=hosts, allow_proxy_command=True)
    proxy = desk.folder / "nc"  # there is none in the lab
    proxy.write_text(
        "#!/usr/bin/env python3\nimport os, select, socket, sys\ns = socket.create_connection(sys.argv[1:3])\n"
        "while True:\n    for r in select.select([0, s], [], [])[0]:\n"
        "        data = os.read(0, 65536) if r == 0 else s.recv(65536)\n"
        "        if not data: sys.exit()\n        s.sendall(data) if r == 0 else os.write(1, data)\n"
    )
    proxy.chmod(0o755)
    path = desk.lab.run("head", "sh", "-c", "echo $PATH", user="gpt", check=True).stdout.strip()
    done = desk.run(*desk.quick("--wait"), HOME=home, PATH=f"{desk.folder}:{path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(desk.ran(host)) for host in HOSTS] == [1, 1, 1]


def test_the_agent_authenticates_and_is_not_forwarded(desk: Desk) -> None:
    home = own_home(desk, "UserKnownHostsFile {home}/known\n", key=False)
    socket = desk.folder / "agent"
    agent = desk.lab.start("head", "ssh-agent", "-D", "-a", str(socket), user="gpt", stdout=subprocess.DEVNULL)
    try:
        await_true(socket.exists, 10)
        (desk.folder / "job.py").write_text("import os\nprint('agent:', os.environ.get('SSH_AUTH_SOCK'), flush=True)\n")
        asked = ["submit", "--cluster", "hosts", "--nodes", "1", "--gpus-per-node", "1", "--follow", "--", "job.py"]
        done = desk.run(*asked, HOME=home, SSH_AUTH_SOCK=str(socket))
        assert done.returncode == 3
        assert "ssh1: no key found for gpt@ssh1:22" in done.stderr
        key = Path(desk.folder / "lab-key")
        key.write_text(desk.lab.key.read_text())
        key.chmod(0o600)
        desk.lab.run("head", "chown", "gpt", str(key), check=True)
        desk.lab.run("head", "ssh-add", str(key), user="gpt", env={"SSH_AUTH_SOCK": str(socket)}, check=True)
        key.unlink()
        done = desk.run(*asked, HOME=home, SSH_AUTH_SOCK=str(socket))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "agent: None" in done.stdout
    finally:
        agent.kill()
        agent.wait()


def test_hosts_behind_the_same_bastion_share_one_connection(desk: Desk) -> None:
    """Counted by the kernel of the bastion: sshd drops connections when many come at once."""
    hosts = [{"host": host, "address": ADDRESSES[host], "proxy_jump": "bastion"} for host in (*HOSTS[:2], "private1")]
    for host, name in zip(hosts, ("10.78.0.51", "10.78.0.52")):
        host["host"] = name  # which only the bastion reaches
    desk.write_profile("quick", python=str(desk.stand_in), hosts=hosts)
    with desk.start(*desk.quick("--follow", JOB_SECONDS="4"), stdout=subprocess.PIPE) as process:
        await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
        connected = desk.on("bastion", "ss -Htn state established '( sport = :22 )'")
        assert process.wait(60) == 0
    assert len(connected.splitlines()) == 1, connected


@pytest.mark.parametrize("host", ["private1", "10.78.0.1"])
def test_there_is_no_route(desk: Desk, host: str) -> None:
    """To a host that only the bastion reaches, without the bastion."""
    desk.write_profile("quick", python=str(desk.stand_in), hosts=[{"host": host}])
    done = desk.run("submit", "--cluster", "quick", "--gpus-per-node", "1", "--", "job.py")
    assert done.returncode == 3
    assert f"error: S010 {host}: gpt@{host}:22: network is unreachable" in done.stderr, done.stderr
