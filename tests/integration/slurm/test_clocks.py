"""Nodes whose clocks differ by ten minutes, and change meanwhile. Oracle: the order in which the test makes ranks fail."""

from __future__ import annotations

import json
import time

import pytest

from tests.clocks import TestClock
from tests.integration.local.causes import LAUNCHER
from tests.integration.slurm.login import Login
from tests.integration.slurm.test_causes import failure_of
from tests.integration.ssh.desk import await_true
from tests.lab import Lab

TEN_MINUTES = 600
# Rank 0, on the first node, fails before rank 2, on the second: the test releases one after the other. Rank 1 takes its
# time to stop, so that srun does not end the second node before that.
FAILING = """
import os, signal, time
def stop(*_):
    while not os.path.exists(gates[1]): time.sleep(0.02)
    os._exit(1)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, stop)
gates = [os.path.join(os.environ["GPTCTL_RUN_DIR"], f"go.{number}") for number in range(4)]
print("up", flush=True)
while not os.path.exists(gates[int(os.environ["RANK"])]): time.sleep(0.02)
raise ValueError(f"rank {os.environ['RANK']} has a reason of its own")
"""


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


@pytest.mark.long
@pytest.mark.parametrize("jump", [0, 3600, -3600])
def test_the_rank_that_failed_first_is_named(login: Login, jump: int) -> None:
    """By the clock of its node the second failure was ten minutes, or an hour, before or after the first."""
    behind = TestClock(login.folder, -TEN_MINUTES)
    (login.folder / "x.py").write_text(FAILING)
    (login.folder / "launcher").write_text(LAUNCHER)
    (login.folder / "launcher").chmod(0o755)
    (login.folder / "own").mkdir()
    variables = " ".join(f"{name}={value}" for name, value in behind.env.items())
    profile = login.lab.profile(
        login.folder / "own",
        python=str(login.folder / "launcher"),
        run_root=str(login.folder / "runs"),
        setup=[f'[ "$SLURM_NODEID" != 1 ] || export {variables}'],
    )
    asked = ["submit", "--cluster", str(profile), "--nodes", "2", "--gpus-per-node", "2", "--json", "--", "x.py"]
    done = login.run(*asked)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    folder = login.folder / "runs" / job
    for rank in range(4):
        log = folder / "logs" / "attempt-0" / f"workerlog.{rank}"
        await_true(lambda: log.exists() and "up" in log.read_text(), 30)  # noqa: B023
    behind.set(-TEN_MINUTES + jump)
    for rank in (0, 2):
        (folder / f"go.{rank}").touch()
        records = folder / "attempt-0" / f"ranks.{rank // 2}.jsonl"
        await_true(lambda: "end" in [json.loads(line)["event"] for line in records.read_text().splitlines()], 30)  # noqa: B023
        # One second apart: what a file system tells of the clocks of nodes is not more precise than a write there.
        time.sleep(1)
    (folder / "go.1").touch()
    failure = failure_of(login, job)[0]["failure"]
    assert (failure["rank"], failure["node"]) == (0, 0), failure
    assert "has a reason of its own" in failure["cause"]
