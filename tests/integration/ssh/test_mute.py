"""Hosts that accept connections and do not answer. Oracles: the clock, what the hosts run, and the words that name the host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ssh.desk import Desk, await_true
from tests.integration.ssh.test_faults import with_hosts
from tests.lab.machines import HERE

PATIENCE = 3  # seconds: start_timeout of the profile
MORE = 5  # seconds that a command may take besides
LIST = 3  # seconds that `list` waits for anybody
START = 4  # seconds for Python itself, on a busy machine
PORT = 2222


class Mute:
    """Two hosts behind forwarders that can make each of them mute, and jobs on both."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.forwarders = []
        for host in ("ssh1", "ssh2", "bastion"):
            folder = desk.folder / host
            folder.mkdir()
            self.order(host, "pass")
            words = (sys.executable, str(HERE / "muter.py"), str(folder), str(PORT), "127.0.0.1", "22")
            self.forwarders.append(desk.lab.start(host, *words, stdout=subprocess.PIPE))
        for each in self.forwarders:
            assert each.stdout
            assert each.stdout.readline()
        self._write_profile()

    def _write_profile(self) -> None:
        known = self.desk.folder / "known"
        lines = [line.partition(" ") for line in self.desk.lab.known_hosts.read_text().splitlines()]
        known.write_text("".join(f"[{names.split(',')[0]}]:{PORT} {key}\n" for names, _, key in lines))
        known.write_text(known.read_text() + self.desk.lab.known_hosts.read_text())
        changes = {"port": PORT}, {"port": PORT}, {"proxy_jump": f"bastion:{PORT}"}
        with_hosts(self.desk, *changes, known_hosts=str(known), start_timeout=PATIENCE)

    def order(self, host: str, mode: str) -> None:
        (self.desk.folder / host / "mute").write_text(mode)

    def connections(self, host: str) -> int:
        seen = self.desk.folder / host / "seen"
        return seen.stat().st_size if seen.exists() else 0

    def submit(self, nodes: int = 1, **env: str) -> str:
        words = self.desk.quick("--nodes", str(nodes), "--json", **env)
        done = self.desk.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["job"])

    def timed(self, *words: str) -> tuple[Any, float]:
        began = time.monotonic()
        done = self.desk.run(*words, timeout=300)
        took = time.monotonic() - began
        print(f"gptctl {' '.join(words)}: {took:.1f} s, exit {done.returncode}\n{done.stdout}{done.stderr}")
        assert "Traceback" not in done.stderr
        return done, took

    def close(self) -> None:
        for each in self.forwarders:
            each.kill()
            each.wait()


@pytest.fixture
def mute(desk: Desk) -> Iterator[Mute]:
    hosts = Mute(desk)
    yield hosts
    hosts.close()


def test_a_mute_host_is_waited_for_once(mute: Mute) -> None:
    """Of two jobs on a mute host `list` shows what it knew, with its age; `cancel` waits for the host once and names it."""
    jobs = [mute.submit(JOB_SECONDS="100"), mute.submit(nodes=2, JOB_SECONDS="100")]
    assert {row["state"] for row in mute.desk.json("list")} == {"RUNNING"}
    mute.order("ssh1", "silent")
    done, took = mute.timed("list", "--json")
    assert took < LIST + START
    for row in json.loads(done.stdout):
        assert (row["state"], row["last_state"]) == ("UNKNOWN", "RUNNING")
        assert 0 < row["age"] < 60
        assert "ssh1" in row["reason"]
        assert "ssh2" not in row["reason"], "it answers"
    done, took = mute.timed("cancel", "--now", *jobs)
    assert took < PATIENCE + MORE
    assert done.returncode == 3
    assert "ssh1" in done.stderr
    mute.order("ssh1", "pass")
    done, _ = mute.timed("cancel", "--now", *jobs)
    assert done.returncode == 0, done.stderr
    assert not mute.desk.left("ssh1")
    assert not mute.desk.left("ssh2")


def stop_sshd(mute: Mute, number: int) -> None:
    """sshd and all its sessions stop: the kernel still accepts connections."""
    sent = mute.desk.lab.run("ssh1", "pkill", f"-{signal.Signals(number).name[3:]}", "-x", "sshd", check=False)
    assert sent.returncode == 0


def hang_shell(mute: Mute) -> None:
    """The host authenticates, and its login shell never runs a command."""
    mute.desk.on("ssh1", "echo 'sleep 100' > ~/.bashrc")


def restore(mute: Mute) -> None:
    mute.order("ssh1", "pass")
    stop_sshd(mute, signal.SIGCONT)
    # What was asked of the shells that hang is answered now, and nobody listens any more.
    mute.desk.on("ssh1", "rm -f ~/.bashrc; pkill -xf 'sleep 100'")


@pytest.mark.long
@pytest.mark.parametrize("fault", ["silent", "greeting", "drip", "stopped", "shell"])
def test_no_command_waits_longer_than_its_patience(mute: Mute, fault: str) -> None:
    """Three jobs on a host that is mute in five ways, and one on a host that works: the time of each command, and its words."""
    jobs = [mute.submit(JOB_SECONDS="300") for _ in range(2)] + [mute.submit(nodes=2, JOB_SECONDS="300")]
    ended = mute.submit()
    mute.desk.wait(ended, "COMPLETED")
    assert {row["state"] for row in mute.desk.json("list")} == {"RUNNING", "COMPLETED"}
    if fault == "stopped":
        stop_sshd(mute, signal.SIGSTOP)
    elif fault == "shell":
        hang_shell(mute)
    else:
        mute.order("ssh1", fault)
    try:
        wrong = []
        for words, code in (
            (("list",), 0),
            (("status", jobs[0]), 0),
            (("logs", jobs[2]), 0),
            (("cancel", *jobs), 3),
            (("rm", "--yes", ended), 3),
            (("fetch", jobs[0]), 3),
            (("wait", jobs[0], "--timeout", "1"), 1),
            (tuple(mute.desk.quick("--nodes", "2")), 3),
            (("doctor", "--cluster", "quick"), 1),
        ):
            done, took = mute.timed(*words)
            # The doctor also imports torch on the hosts that answer.
            limits = {"list": LIST + START, "doctor": PATIENCE + MORE + 20}
            limit = limits.get(words[0], PATIENCE + MORE)
            if took > limit or done.returncode != code or "ssh1" not in done.stdout + done.stderr:
                wrong.append((words[0], took, done.returncode))
        assert not wrong
    finally:
        restore(mute)
    done, _ = mute.timed("cancel", "--now", *jobs)
    assert done.returncode == 0, done.stderr
    await_true(lambda: not mute.desk.left("ssh1") + mute.desk.left("ssh2"), 20, lambda: str(mute.desk.left("ssh1")))


@pytest.mark.long
@pytest.mark.parametrize("host", ["ssh1", "ssh2"])
def test_a_mute_sftp_server_does_not_protect_a_job(desk: Desk, host: str) -> None:
    """Commands of that host are answered: the state is known, and `cancel` stops the job everywhere."""
    with_hosts(desk, start_timeout=PATIENCE)
    job = desk.submit_quick("--nodes", "2", JOB_SECONDS="300")["job"]
    config = desk.lab.sshd.folder / f"{host}.conf"
    before = config.read_text()
    config.write_text(before.replace("internal-sftp", "/bin/sleep 1000"))
    assert config.read_text() != before
    desk.lab.restart_sshd(host)
    try:
        for words, state in ((("status",), "RUNNING"), (("cancel", "--now"), "CANCELLED")):
            began = time.monotonic()
            done = desk.run(*words, job, "--json", timeout=300)
            took = time.monotonic() - began
            assert done.returncode == 0, done.stderr
            assert took < PATIENCE + MORE + START, (words, took, done.stderr)
            answer = json.loads(done.stdout)
            assert (answer[0] if isinstance(answer, list) else answer)["state"] == state
        left = desk.left("ssh1") + desk.left("ssh2")
        assert not [process for process in left if "sleep 1000" not in process]
    finally:
        config.write_text(before)
        desk.lab.restart_sshd(host)


@pytest.mark.long
def test_a_mute_jump_host_is_named(mute: Mute) -> None:
    """The hosts in front of it are asked as usual; nothing waits longer for those behind it."""
    job = mute.submit(nodes=3, JOB_SECONDS="300")
    mute.order("bastion", "silent")
    for words, code in (
        (("list",), 0),
        (("status", job), 0),
        (("cancel", "--now", job), 3),
        (tuple(mute.desk.quick()), 3),
    ):
        done, took = mute.timed(*words)
        assert took < (LIST + START if words[0] == "list" else PATIENCE + MORE)
        assert done.returncode == code
    assert "bastion" in done.stderr
    mute.order("bastion", "pass")
    done, _ = mute.timed("cancel", "--now", job)
    assert done.returncode == 0, done.stderr
    assert not [host for host in ("ssh1", "ssh2", "private1") if mute.desk.left(host)]


@pytest.mark.long
def test_a_host_that_stops_sending_in_the_middle_of_a_file(mute: Mute) -> None:
    """`fetch` gives up, names the host, and continues with the rest of the file later."""
    job = mute.submit()
    mute.desk.wait(job, "COMPLETED")
    large = f"{mute.desk.run_root}/{job}/code/large"  # where the script runs
    mute.desk.on("ssh1", f"head -c 300000000 /dev/urandom > {large}")
    mute.order("ssh1", "slow")
    fetch = mute.desk.start("fetch", job, stderr=subprocess.PIPE)
    place = mute.desk.json("status", job)["run_dir"]
    await_true(lambda: bool(mute.desk.on("head", f"find {place}/.fetching -type f -size +1M")), 60)
    mute.order("ssh1", "silent")
    began = time.monotonic()
    _, said = fetch.communicate(timeout=120)
    assert time.monotonic() - began < PATIENCE + MORE
    assert fetch.returncode == 3, said
    assert "ssh1" in said
    assert "Traceback" not in said
    mute.order("ssh1", "pass")
    done, _ = mute.timed("fetch", job)
    assert done.returncode == 0, done.stderr
    there = mute.desk.on("ssh1", f"sha256sum < {large}")
    copy = Path(place, "work", "large")
    assert mute.desk.on("head", f"sha256sum < {copy}") == there


@pytest.mark.long
def test_ctrl_c_ends_a_wait_for_a_mute_host(mute: Mute) -> None:
    """At once, with exit code 130, whatever the command is; what runs continues."""
    job = mute.submit(JOB_SECONDS="300")
    mute.order("ssh1", "silent")
    for words in (("list",), ("status", job), ("logs", job), ("cancel", job), tuple(mute.desk.quick())):
        command = mute.desk.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(1.5)  # it has started, and waits
        mute.desk.lab.signal(command, signal.SIGINT)
        began = time.monotonic()
        out, err = command.communicate(timeout=60)
        assert time.monotonic() - began < 1.5, words
        assert command.returncode == 130, (words, out, err)
        assert "Traceback" not in err
    mute.order("ssh1", "pass")
    assert mute.desk.json("status", job)["state"] == "RUNNING"
    assert mute.timed("cancel", "--now", job)[0].returncode == 0


@pytest.mark.long
def test_a_slow_line_delays_no_command_but_those_that_show_logs(mute: Mute) -> None:
    """`status` and `cancel` copy what they can in their time, and `logs` the rest."""
    mute.desk.stand_in.write_text(
        '#!/bin/bash\n[ $# = 0 ] || case "$1 $2" in \'-m torch.distributed.run\') ;; *) exec python3 "$@" ;; esac\n'
        'yes 0123456789 | head -c 30000000 > "$GPTCTL_LOG_DIR/workerlog.0"; touch "$GPTCTL_RUN_DIR/ran"; sleep 300\n'
    )
    job = mute.submit()
    await_true(lambda: bool(mute.desk.on("ssh1", f"ls {mute.desk.run_root}/{job}/ran")), 30)
    mute.order("ssh1", "slower")
    copy = mute.desk.folder / "home" / "runs" / job / "logs/attempt-0/workerlog.0"
    done, took = mute.timed("status", job)
    assert done.returncode == 0
    assert took < PATIENCE + MORE
    assert copy.stat().st_size < 30_000_000
    assert mute.desk.json("list")[0]["state"] == "RUNNING"
    mute.order("ssh1", "pass")
    assert mute.timed("logs", job, "--tail", "1")[0].returncode == 0
    assert copy.stat().st_size == 30_000_000
    assert mute.timed("cancel", "--now", job)[0].returncode == 0
