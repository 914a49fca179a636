"""Which rank failed first, and why, on hosts that share no files. Oracle: the rank and the failure that the test chose."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.local.causes import CASES, LAUNCHER, Case
from tests.integration.ssh.desk import Desk, await_true

NAMES = ("exception", "SIGKILL", "exit with text", "import error")


def failure_of(desk: Desk, job: str, seconds: float = 60) -> dict[str, Any]:
    """The row of `list --json`; the line of `list` has the same reason."""
    desk.wait(job, "FAILED", seconds=seconds)
    row = next(row for row in desk.json("list") if row["job"] == job)
    line = next(line for line in desk.run("list").stdout.splitlines() if line.startswith(job))
    assert line.endswith(row["reason"])
    return row  # type: ignore[no-any-return]


def submit(desk: Desk, program: str) -> str:
    launcher = desk.lab.folder / "tmp" / f"launcher-{desk.folder.name}"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    (desk.folder / "x.py").write_text(program)
    desk.write_profile("own", python=str(launcher))
    asked = ["submit", "--cluster", "own", "--nodes", "2", "--gpus-per-node", "2", "--json", "--", "x.py"]
    done = desk.run(*asked)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job"])


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def test_the_first_failure_is_the_reason(desk: Desk, case: Case) -> None:
    row = failure_of(desk, submit(desk, case.program))
    failure = row["failure"]
    assert re.fullmatch(case.cause, failure["cause"]), row
    assert (failure["rank"], failure["node"], failure["host"]) == (3, 1, "ssh2")
    assert row["reason"] == f"rank 3 (node 1): {failure['cause']}"


@pytest.mark.long
def test_a_killed_agent(desk: Desk) -> None:
    """The agent of the second host is gone, and its ranks with it."""
    job = submit(desk, "import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    await_true(lambda: "up" in desk.on("ssh2", f"cat {desk.run_root}/{job}/logs/attempt-0/workerlog.3"), 30)
    desk.on("ssh2", f"pkill -9 -f 'engine.pyz agent {desk.run_root}/{job}'")
    row = failure_of(desk, job, seconds=120)
    assert (row["failure"]["rank"], row["failure"]["node"]) == (None, 1)
    assert row["reason"].startswith("node 1 (10.78.0.52): its host is lost: "), row


@pytest.mark.long
def test_a_lost_host(desk: Desk) -> None:
    job = submit(desk, "import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    await_true(lambda: "up" in desk.on("ssh2", f"cat {desk.run_root}/{job}/logs/attempt-0/workerlog.3"), 30)
    desk.lab.crash("ssh2")
    row = failure_of(desk, job, seconds=180)
    assert row["reason"].startswith("node 1 (10.78.0.52): its host is lost: "), row


@pytest.mark.long
def test_the_likely_cause_on_a_host_of_its_own(desk: Desk) -> None:
    """The log that tells it is on the second host: `why` copies it first. The text of the failure says nothing."""
    broken = "print('OSError: [Errno 122] Disk quota exceeded\\nbye', flush=True)\n        os._exit(9)"
    program = f"import os, time\nif True:\n    if os.environ['RANK'] == '3':\n        {broken}\n    time.sleep(60)\n"
    job = submit(desk, program)
    desk.wait(job, "FAILED", seconds=60)
    facts = desk.json("why", job)
    assert (facts["failure"]["rank"], facts["failure"]["host"]) == (3, "ssh2")
    assert (facts["likely_cause"]["code"], facts["likely_cause"]["where"]) == ("K044", "rank 3")
