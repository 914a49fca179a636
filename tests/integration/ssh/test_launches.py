"""Launches whose connections break at any moment. Oracle: on every host the job ran, or on none, and nothing is left."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.integration.ssh.desk import HOSTS, Desk, await_true

LEASE = 5  # seconds, as the profile says


@pytest.mark.parametrize(
    ("launches", "cuts"),
    [(10, (0.5, 2.0)), pytest.param(100, (0.5, 2.0, LEASE + 3.0), marks=pytest.mark.long)],
    ids=["10", "100"],
)
def test_connections_break_during_launches(desk: Desk, launches: int, cuts: Sequence[float]) -> None:
    """At moments all over a launch gptctl is killed, sshd of some hosts is restarted, or they are cut off for a while."""
    chance = random.Random(launches)
    began = time.monotonic()
    desk.submit_quick("--name", "whole")
    usual = time.monotonic() - began
    for number in range(launches):
        process = desk.start(*desk.quick("--name", f"try{number}"))
        time.sleep(usual * (number + chance.random()) / launches)
        break_something(desk, chance, ("kill", "sshd", "cut")[number % 3], process, cuts)
        process.wait(120)
    await_true(lambda: not any(map(desk.left, HOSTS)), 60, lambda: str([*map(desk.left, HOSTS)]))
    desk.run("list")  # settles what a killed gptctl left
    where = {host: set(desk.on(host, f"cd {desk.run_root} && dirname */ran").split()) for host in HOSTS}
    assert where["ssh1"] == where["ssh2"] == where["private1"]
    jobs = desk.json("list", "--all")
    known = {job["job"] for job in jobs}
    folders = {host: set(desk.on(host, f"ls {desk.run_root}").split()) for host in HOSTS}
    assert all(found == known for found in folders.values()), (folders, known)
    states = Counter(job["state"] for job in jobs)
    print(f"{launches} launches: {len(known) - 1} started ({dict(states)}), 0 half-started, 0 processes left")
    assert 1 < len(known) <= launches


@pytest.mark.parametrize(
    ("phase", "victims"),
    [("sending", ("ssh1", "private1"))]
    + [
        pytest.param(phase, victims, marks=pytest.mark.long)
        for phase in ("connecting", "sending", "all")
        for victims in (("ssh1",), ("ssh2",), ("ssh2", "private1"), HOSTS)
    ],
)
def test_a_cut_in_every_phase_is_undone_while_it_lasts(desk: Desk, phase: str, victims: Sequence[str]) -> None:
    """Hosts that are out of reach end what was begun there by themselves, when their lease is over."""
    with desk.start(*desk.quick("--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr
        next(line for line in process.stderr if line.startswith(phase))
        for victim in victims:
            desk.lab.cut(victim)
        said = process.communicate(timeout=120)[1]
    ran = {host: desk.ran(host) for host in HOSTS}
    if not any(ran.values()):
        await_true(lambda: not any(map(desk.left, HOSTS)), 3 * LEASE, lambda: str([*map(desk.left, HOSTS)]))
    for victim in victims:
        desk.lab.restore(victim)
    await_true(lambda: not any(map(desk.left, HOSTS)), 60, lambda: str([*map(desk.left, HOSTS)]))
    jobs = [job["job"] for job in desk.json("list", "--all")]
    assert len({bool(desk.ran(host)) for host in HOSTS}) == 1, (ran, said)
    assert not (jobs and " was not started" in said), said
    assert not (jobs and "nothing was started" in said), said
    for host in HOSTS:
        assert desk.on(host, f"ls {desk.run_root} 2> /dev/null").split() == jobs, (host, said)


def break_something(
    desk: Desk, chance: random.Random, kind: str, process: subprocess.Popen[str], cuts: Sequence[float]
) -> None:
    victims = chance.sample(HOSTS, chance.randint(1, len(HOSTS)))
    if kind == "kill":
        process.kill()
    for victim in victims:
        if kind == "cut":
            desk.lab.cut(victim)
        elif kind == "sshd":
            desk.lab.restart_sshd(victim)
    if kind == "cut":
        time.sleep(chance.choice(cuts))
        for victim in victims:
            desk.lab.restore(victim)
