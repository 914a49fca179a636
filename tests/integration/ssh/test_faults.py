"""Hosts that cannot be trusted, reached or used when a job starts. Oracles: what was done to them, and what is left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk, await_true
from tests.lab.sshd import make_key


def assert_nothing_happened(desk: Desk) -> None:
    """On no host is anything left, after the lease at the latest."""
    await_true(lambda: not any(desk.left(host) for host in HOSTS), 20, lambda: str([desk.left(host) for host in HOSTS]))
    for host in HOSTS:
        assert desk.on(host, f"ls {desk.run_root} 2> /dev/null") == ""
    assert desk.json("list") == []


def refused(desk: Desk, *words: str, **how: str) -> str:
    done = desk.run(*desk.quick(), timeout=60, **how)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert_nothing_happened(desk)
    return str(done.stderr)


def with_hosts(desk: Desk, *changes: dict[str, object], **keys: object) -> None:
    """The profile `quick` with these changes to its hosts."""
    hosts = [{"host": host, "address": ADDRESSES[host]} for host in HOSTS]
    hosts[2]["proxy_jump"] = "bastion"
    for host, change in zip(hosts, changes):
        host.update(change)  # type: ignore[arg-type]
    desk.write_profile("quick", python=str(desk.stand_in), hosts=hosts, **keys)


def test_a_key_that_nobody_has_pinned(desk: Desk) -> None:
    """`hosts trust` shows the fingerprints, the jump host's first, and pins them; then it works."""
    known = str(desk.folder / "known")
    with_hosts(desk, known_hosts=known)
    refused(
        desk, f"ssh1: its host key is not in {known}", f"bastion: its host key is not in {known}", "gptctl hosts trust"
    )
    shown = desk.run("hosts", "trust", "quick", stdin="n\n")
    assert not Path(known).exists()
    assert re.search(r"ssh2 +ssh-ed25519 SHA256:\S+ +new", shown.stdout), shown.stdout
    assert shown.returncode == 1
    assert desk.run("hosts", "trust", "quick", stdin="").returncode == 2
    done = desk.run("hosts", "trust", "quick", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = desk.json("hosts", "trust", "quick")["keys"]
    assert {row["host"]: row["state"] for row in rows} == dict.fromkeys(
        ("ssh1", "ssh2", "bastion", "private1"), "known"
    )
    public = desk.lab.run("head", "ssh-keygen", "-lf", str(desk.lab.folder / "ssh/ssh1.hostkey.pub"), check=True).stdout
    assert rows[0]["key"].split()[1] in public
    desk.wait(desk.submit_quick()["job"], "COMPLETED")


def test_a_key_that_has_changed(desk: Desk, tmp_path: Path) -> None:
    """A hard stop, also for `hosts trust`."""
    other = make_key(tmp_path / "other").split()
    known = desk.folder / "known"
    lines = [line for line in desk.lab.known_hosts.read_text().splitlines() if not line.startswith("ssh2,")]
    known.write_text("\n".join([*lines, f"ssh2 {other[0]} {other[1]}", ""]))
    with_hosts(desk, known_hosts=str(known))
    refused(desk, "ssh2: its host key has CHANGED", "this may be an attack")
    done = desk.run("hosts", "trust", "quick", "--yes")
    assert done.returncode == 1
    assert "the key of ssh2 has CHANGED" in done.stderr
    assert len(known.read_text().splitlines()) == len(lines) + 1


@pytest.fixture
def silent(desk: Desk) -> Iterator[int]:
    """A port of ssh2 where somebody listens who says nothing."""
    script = "import socket, time; s = socket.create_server(('', 29517)); print(flush=True); time.sleep(100)"
    listener = desk.lab.start("ssh2", "python3", "-c", script, stdout=subprocess.PIPE)
    assert listener.stdout
    listener.stdout.readline()
    yield 29517
    listener.kill()
    listener.wait()


def test_hosts_that_cannot_be_used_are_told_all_at_once(desk: Desk, silent: int) -> None:
    with_hosts(desk, {"host": "nowhere.invalid"}, {"port": silent}, {"proxy_jump": "ssh1:3"}, start_timeout=2)
    refused(
        desk,
        "nowhere.invalid: cannot resolve host name nowhere.invalid",
        f"ssh2: gpt@ssh2:{silent} does not answer",
        "ssh1: gpt@ssh1:3: connection refused",
    )


def test_a_key_that_no_host_accepts(desk: Desk, tmp_path: Path) -> None:
    key = desk.folder / "key"
    make_key(key)
    desk.lab.run("head", "chown", "gpt", str(key), check=True)
    with_hosts(desk, identity_file=str(key))
    refused(desk, f"gpt@ssh1:22 does not accept {key}", "identity_file")


def test_python_is_missing_on_one_host(desk: Desk) -> None:
    own = "/home/gpt/own-python"
    for host in HOSTS[:2]:
        desk.on(host, f"cp {desk.stand_in} {own}")
    desk.write_profile("quick", python=own)
    assert "ssh1" not in refused(desk, f"private1: cannot find {own}")


def test_what_a_job_reads_is_missing_on_one_host(desk: Desk) -> None:
    """Its data, and a secret: told before anything starts."""
    for host in HOSTS[:2]:
        desk.on(host, "mkdir -p ~/data; echo x > ~/data/token")
    desk.on("ssh2", "rm ~/data/token")
    keys = ["-o", "Launch.secrets.A.file=/home/gpt/data/token"]
    done = desk.run(*desk.quick(*keys))
    assert done.returncode == 3
    assert "S010 ssh2: cannot read /home/gpt/data/token" in done.stderr
    assert "S010 private1: cannot read /home/gpt/data/token" in done.stderr
    assert_nothing_happened(desk)
    keys = ("Data.Train.dataset.path=/home/gpt/data", "Global.global_batch_size=12")
    done = desk.run(*desk.train("--nodes", "3", "--gpus-per-node", "1", keys=keys))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "S010 private1: cannot read /home/gpt/data" in done.stderr
    assert "ssh2" not in done.stderr
    assert_nothing_happened(desk)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("echo bad things >&2; exit 5", "ssh2: the setup exited with code 5"),
        ("if then (", "ssh1: the setup exited with code 2"),
        ("false", "ssh2: setup failed: "),
        pytest.param("sleep 1000", "ssh2: the setup did not finish in", marks=pytest.mark.long),
    ],
)
def test_a_setup_that_fails_or_hangs_leaves_nothing(desk: Desk, line: str, words: str) -> None:
    """On one host it does; where gptctl cannot take it back, the host does it by itself."""
    desk.write_profile("quick", python=str(desk.stand_in), setup=[f"[ $(hostname) != ssh2 ] || {{ {line}; }}"])
    if "if" in line:
        desk.write_profile("quick", python=str(desk.stand_in), setup=[line])
    refused(desk, words)


def test_a_login_shell_that_talks_and_a_setup_that_closes_everything(desk: Desk) -> None:
    desk.on("ssh1", "echo 'echo welcome; echo to ssh1' > ~/.bashrc")
    try:
        desk.write_profile("quick", python=str(desk.stand_in), setup=["echo hello", "cat", "exec <&-"])
        job = desk.submit_quick(JOB_SECONDS="60")
        assert desk.json("status", job["job"])["state"] == "RUNNING"
        assert desk.run("cancel", "--now", job["job"]).returncode == 0
    finally:
        desk.on("ssh1", "rm ~/.bashrc")


def test_an_interpreter_that_does_not_start(desk: Desk) -> None:
    own = "/home/gpt/broken-python"
    for host in HOSTS:
        desk.on(host, f"cp {desk.stand_in} {own}")
    desk.on("ssh2", f"printf '#!/bin/sh\nexit 127\n' > {own}")
    desk.write_profile("quick", python=own)
    refused(desk, f"ssh2: {own} does not start")


def test_two_users_may_submit_the_same(desk: Desk) -> None:
    """Each with records of their own; neither finds or ends the other's job."""
    jobs = [json.loads(desk.run(*desk.quick("--json"), GPTCTL_HOME=str(desk.folder / name)).stdout) for name in "ab"]
    assert jobs[0]["job"] != jobs[1]["job"]


def test_the_disk_of_one_host_is_full(desk: Desk) -> None:
    desk.lab.run(
        "ssh2",
        "sh",
        "-c",
        f"mkdir -p {desk.run_root}; mount -t tmpfs -o size=64k,mode=1777 x {desk.run_root}",
        check=True,
    )
    try:
        refused(desk, "ssh2: ", "No space left on device")
    finally:
        desk.lab.run("ssh2", "umount", desk.run_root, check=True)


def test_the_port_is_taken_on_the_first_host(desk: Desk, silent: int) -> None:
    with_hosts(desk, {"host": "ssh2", "address": ADDRESSES["ssh2"]}, {"host": "ssh1", "address": ADDRESSES["ssh1"]})
    done = desk.run(*desk.quick("-o", f"Launch.rdzv.port={silent}"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"ssh2: port {silent}, set by Launch.rdzv, cannot be used: " in done.stderr
    assert "Address already in use" in done.stderr
    assert_nothing_happened(desk)


def test_gptctl_is_killed_while_it_starts_a_job(desk: Desk) -> None:
    """Or interrupted. Whenever that is, the next one knows the job, or nothing is left of it."""
    begin = time.monotonic()
    desk.wait(desk.submit_quick()["job"], "COMPLETED")
    whole = time.monotonic() - begin
    for part in range(6):
        process = desk.start(*desk.quick("--name", f"killed{part}"))
        time.sleep(whole * (part + 1) / 8)
        with suppress(IndexError):  # it has ended
            desk.lab.signal(process, signal.SIGINT if part % 2 else signal.SIGKILL)
        process.wait()
    await_true(lambda: not any(desk.left(host) for host in HOSTS), 30)
    known = {job["job"] for job in desk.json("list")}
    for host in HOSTS:
        assert set(desk.on(host, f"ls {desk.run_root}").split()) == known


@pytest.mark.long
def test_cancel_while_the_hosts_are_prepared(desk: Desk) -> None:
    """`cancel` says CANCELLED and `submit` says why nothing runs; no process is left."""
    with_hosts(desk, setup=["sleep 6"])
    submit = desk.start(*desk.quick("--nodes", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await_true(lambda: any("sleep 6" in process for process in desk.left("ssh1")), 30)
    job = desk.json("list")[-1]["job"]
    done = desk.run("cancel", job, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"job": job, "state": "CANCELLED"}]
    _, said = submit.communicate(timeout=60)
    assert submit.returncode == 1, said
    assert f"{job} was cancelled while it was being started" in said
    await_true(lambda: not desk.left("ssh1") + desk.left("ssh2"), 20, lambda: str(desk.left("ssh1")))
