"""Agents that are killed at any moment. Oracle: the process table of every host, and what `cancel` says afterwards."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from gptctl.engine.guard import AGENT_LEASE
from tests.integration.ssh.desk import HOSTS, Desk, await_true

# Each rank has a child, and one that has lost every trace of the job but its ancestors: of agent and guard one must
# be left to find that.
RANK = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "301"])
if os.environ["VICTIM"] != "both":
    subprocess.Popen(["setsid", "env", "-i", "sleep", "302"])
print("ready", flush=True)
time.sleep(300)
"""


def agent_on(desk: Desk, host: str, job: str = "*") -> dict[str, Any]:
    """What the agent of a job has recorded of itself; empty before that."""
    found = desk.on(host, f"cat {desk.run_root}/{job}/agent.*.json 2> /dev/null")
    return json.loads(found) if found else {}  # type: ignore[no-any-return]


def kill(desk: Desk, host: str, victim: str = "agent", job: str = "*") -> None:
    agent = agent_on(desk, host, job)
    pids = {"agent": [agent["pid"]], "guard": [agent["guard"]["pid"]]}
    pids["both"] = pids["guard"] + pids["agent"]
    desk.lab.run(host, "kill", "-9", *map(str, pids[victim]), check=True)


def of_job(desk: Desk, host: str, job: str) -> list[str]:
    """The processes of one job there, with those that wait for their death."""
    return [line for line in desk.left(host) if f"/{job}" in line]


def await_nothing(desk: Desk, *hosts: str) -> float:
    begin = time.monotonic()
    found: list[list[str]] = []

    def is_empty() -> bool:
        found[:] = map(desk.left, hosts)
        return not any(found)

    await_true(is_empty, AGENT_LEASE, lambda: str(found))
    return time.monotonic() - begin


def submit_ranks(desk: Desk, victim: str) -> str:
    (desk.folder / "rank.py").write_text(RANK)
    asked = ["submit", "--cluster", "hosts", "--nodes", "3", "--gpus-per-node", "1", "--json"]
    done = desk.run(*asked, "--env", f"VICTIM={victim}", "--", "rank.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads(done.stdout)["job"])


def await_on_all(desk: Desk, pattern: str) -> None:
    await_true(lambda: all(desk.on(host, f"ls {desk.run_root}/{pattern} 2> /dev/null") for host in HOSTS), 60)


def setups(desk: Desk, line: str) -> None:
    desk.write_profile("hosts", setup=[line])
    desk.write_profile("quick", python=str(desk.stand_in), setup=[line])


# Each brings a job into its phase on all hosts, and returns its id.


def in_setup(desk: Desk, host: str, victim: str) -> str:
    # agent.sh runs it, too, before there is any attempt.
    setups(desk, '[ -z "${GPTCTL_ATTEMPT:-}" ] || { touch "$GPTCTL_RUN_DIR/in-setup"; sleep 303 & sleep 304; }')
    job = str(desk.submit_quick()["job"])
    await_on_all(desk, f"{job}/in-setup")
    return job


def starting(desk: Desk, host: str, victim: str) -> str:
    # Another host is late, so torchrun waits for it.
    late = HOSTS[HOSTS.index(host) - 1]
    setups(desk, f'[ -z "${{GPTCTL_ATTEMPT:-}}" ] || [ $(hostname) != {late} ] || sleep 305')
    job = submit_ranks(desk, victim)
    await_true(lambda: bool(desk.on(host, f"ls {desk.run_root}/{job}/attempt-0/node.*.pid 2> /dev/null")), 60)
    return job


def running(desk: Desk, host: str, victim: str) -> str:
    job = submit_ranks(desk, victim)
    ready = f"grep -l ready {desk.run_root}/{job}/logs/attempt-0/workerlog.* 2> /dev/null"
    await_true(lambda: all(desk.on(host, ready) for host in HOSTS), 120)
    return job


def stopping(desk: Desk, host: str, victim: str) -> str:
    """The ranks have been asked to stop, and do not."""
    job = running(desk, host, victim)
    stopped = desk.start("cancel", job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    desk.ending = stopped  # type: ignore[attr-defined]
    await_true(lambda: bool(desk.on("ssh1", f"ls {desk.run_root}/{job}/cancelled 2> /dev/null")), 20)
    return job


def between_attempts(desk: Desk, host: str, victim: str) -> str:
    """One node has failed, and the others have a moment to exit by themselves."""
    fails = HOSTS[HOSTS.index(host) - 1]
    setups(desk, f'[ -z "${{GPTCTL_ATTEMPT:-}}" ] || [ $(hostname) != {fails} ] || false')
    job = str(desk.submit_quick("--max-restarts", "1", JOB_SECONDS="300")["job"])
    await_true(lambda: bool(desk.on(fails, f"ls {desk.run_root}/{job}/attempt-0/node.*.exit 2> /dev/null")), 30)
    return job


PHASES: dict[str, Callable[[Desk, str, str], str]] = {
    "setup": in_setup,
    "starting": starting,
    "running": running,
    "stopping": stopping,
    "between": between_attempts,
}
SHORT = (("setup", "ssh1", "both"),)


@pytest.mark.parametrize(
    ("phase", "host", "victim"),
    [
        pytest.param(phase, host, victim, marks=() if (phase, host, victim) in SHORT else pytest.mark.long)
        for phase in PHASES
        for host in HOSTS
        for victim in ("agent", "both")
    ],
)
def test_nothing_of_a_job_outlives_the_agent_of_a_host(desk: Desk, phase: str, host: str, victim: str) -> None:
    """On its host within the lease, and on the others, too: they are told, or lose the connection."""
    job = PHASES[phase](desk, host, victim)
    kill(desk, host, victim, job)
    took = await_nothing(desk, host)
    print(f"{phase}, {victim} on {host}: nothing left after {took:.2f} s")
    if phase == "stopping":
        desk.ending.wait(100)  # type: ignore[attr-defined]
    facts = desk.wait(job, "FAILED", "LOST", "CANCELLED")
    # The job may be restarted once, but not without this host. The first host is the one that would do so.
    if phase == "between" and host != "ssh1":
        assert facts["attempts"] == 1, facts
        assert f"not restarted after the loss of node {HOSTS.index(host)} (" in facts["reason"], facts
    await_nothing(desk, *HOSTS)
    done = desk.run("cancel", job)
    assert done.returncode == 0, done.stderr
    assert not desk.json("status", job)["not_ended"]


@pytest.mark.parametrize(
    ("host", "victim"),
    [
        pytest.param(host, victim, marks=() if (host, victim) == ("ssh2", "agent") else pytest.mark.long)
        for host in HOSTS
        for victim in ("agent", "both", "TERM", "USR1")
    ],
)
def test_before_the_commit_nothing_is_left_at_all(desk: Desk, host: str, victim: str) -> None:
    """No process and no folder, on any host, and gptctl says which host is missing."""
    # The other hosts are late, so the agent waits for them.
    setups(desk, f'[ -n "${{GPTCTL_ATTEMPT:-}}" ] || [ $(hostname) = {host} ] || sleep 3')
    process = desk.start(*desk.quick(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    await_true(lambda: bool(agent_on(desk, host)), 30)
    if victim in ("agent", "both"):
        kill(desk, host, victim)
    else:
        desk.on(host, f"kill -{victim} {agent_on(desk, host)['pid']}")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 3, said
    # The others notice first that the agent of the first host is missing.
    assert (f"S010 {host}: " if host != "ssh1" else "the first host cannot be reached from here") in said, said
    if victim in ("TERM", "USR1") and host != "ssh1":
        assert f"its agent received SIG{victim}" in said, said
    await_nothing(desk, *HOSTS)
    for each in HOSTS:
        assert desk.on(each, f"ls {desk.run_root} 2> /dev/null") == ""


@pytest.mark.long
@pytest.mark.parametrize("victim", ["agent", "both"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_agent_is_killed_while_its_job_waits(desk: Desk, host: str, victim: str) -> None:
    """The job that runs meanwhile does not notice."""
    first = str(desk.submit_quick("--name", "first", JOB_SECONDS="300")["job"])
    await_on_all(desk, f"{first}/ran")
    job = str(desk.submit_quick("--name", "second", "--queue")["job"])
    assert desk.json("status", job)["state"] == "PENDING"
    kill(desk, host, victim, job)
    await_true(lambda: not any(of_job(desk, each, job) for each in HOSTS), AGENT_LEASE)
    assert desk.json("status", job)["state"] in ("FAILED", "LOST")
    assert desk.json("status", first)["state"] == "RUNNING"
    assert desk.run("cancel", "--now", job, first).returncode == 0
    await_nothing(desk, *HOSTS)


@pytest.mark.long
def test_a_job_does_not_need_its_guards(desk: Desk) -> None:
    job = str(desk.submit_quick(JOB_SECONDS="10")["job"])
    await_on_all(desk, f"{job}/ran")
    for host in HOSTS:
        kill(desk, host, "guard", job)
    desk.wait(job, "COMPLETED")
    await_nothing(desk, *HOSTS)


def test_a_lost_node_is_remembered_until_its_host_has_answered(desk: Desk) -> None:
    """Everything that would end its processes is killed: only `cancel` can, and says so while it cannot."""
    desk.write_profile("quick", python=str(desk.stand_in), start_timeout=2)
    job = str(desk.submit_quick(JOB_SECONDS="300")["job"])
    await_on_all(desk, f"{job}/ran")
    desk.on("ssh2", "pkill -9 -f 'agent.sh [k]ill_orphans'")
    kill(desk, "ssh2", "both", job)
    facts = desk.wait(job, "FAILED")
    assert facts["not_ended"] == ["ssh2"], facts
    assert f"; may still be running on ssh2: gptctl cancel {job}" in facts["reason"], facts
    assert "may still be running on ssh2" in desk.run("list").stdout
    assert of_job(desk, "ssh2", job)
    refused = desk.run("rm", "--yes", job)
    assert refused.returncode == 3, refused.stderr
    assert f"{job} may still be running on ssh2" in refused.stderr
    desk.lab.cut("ssh2")
    done = desk.run("cancel", job, timeout=100)
    assert done.returncode == 3, done.stderr
    assert "ssh2" in done.stderr
    assert desk.json("status", job)["not_ended"] == ["ssh2"]
    desk.lab.restore("ssh2")
    done = desk.run("cancel", job)
    assert done.returncode == 0, done.stderr
    assert desk.left("ssh2") == []
    assert desk.json("status", job)["not_ended"] == []
    assert desk.run("rm", "--yes", job).returncode == 0
