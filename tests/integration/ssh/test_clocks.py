"""Hosts whose clocks differ by ten minutes, and change meanwhile. Oracle: the order in which the test makes ranks fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clocks import TestClock
from tests.integration.ssh.desk import Desk, await_true
from tests.integration.ssh.test_causes import failure_of, submit

TEN_MINUTES = 600
# Rank 0, on the first host, fails before rank 2, on the second: the test releases one after the other.
FAILING = """
import os, time
gate = os.path.join(os.environ["GPTCTL_RUN_DIR"], "go")
print("up", flush=True)
while not os.path.exists(gate): time.sleep(0.02)
raise ValueError(f"rank {os.environ['RANK']} has a reason of its own")
"""


@pytest.fixture
def behind(desk: Desk) -> Iterator[TestClock]:
    """The clock of ssh2: of every process that a connection starts there."""
    clock = TestClock(desk.folder, -TEN_MINUTES)
    conf = desk.lab.sshd.folder / "ssh2.conf"
    before = conf.read_text()
    settings = " ".join(f"{name}={value}" for name, value in clock.env.items())
    conf.write_text(before.replace("SetEnv ", f"SetEnv {settings} "))
    desk.lab.restart_sshd("ssh2")
    yield clock
    conf.write_text(before)
    desk.lab.restart_sshd("ssh2")


@pytest.mark.parametrize("jump", [0, *(pytest.param(jump, marks=pytest.mark.long) for jump in (3600, -3600))])
def test_the_rank_that_failed_first_is_named(desk: Desk, behind: TestClock, jump: int) -> None:
    """By the clock of its host the second failure was ten minutes, or an hour, before or after the first."""
    job = submit(desk, FAILING)
    folder = f"{desk.run_root}/{job}"
    for host, rank in (("ssh1", 0), ("ssh2", 2)):
        await_true(lambda: "up" in desk.on(host, f"cat {folder}/logs/attempt-0/workerlog.{rank}"), 30)  # noqa: B023
    behind.set(-TEN_MINUTES + jump)
    for host, node in (("ssh1", 0), ("ssh2", 1)):
        desk.on(host, f"touch {folder}/go")
        await_true(lambda: '"end"' in desk.on(host, f"cat {folder}/attempt-0/ranks.{node}.jsonl"), 30)  # noqa: B023
    failure = failure_of(desk, job)["failure"]
    assert (failure["node"], failure["host"]) == (0, "ssh1"), failure
    assert "has a reason of its own" in failure["cause"]
