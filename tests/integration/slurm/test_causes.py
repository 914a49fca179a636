"""Which rank failed first, and why, on Slurm. Oracle: the rank and the failure that the test chose."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.local.causes import CASES, LAUNCHER, Case
from tests.integration.slurm.login import Login
from tests.lab import Lab


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


NAMES = ("exception", "SIGKILL", "exit with text", "import error", "script missing")


def failure_of(login: Login, job: str) -> tuple[dict[str, Any], str]:
    """The row of `list --json`, and the line of `list`."""
    login.wait(job, "FAILED")
    row = next(row for row in login.json("list") if row["job"] == job)
    line = next(line for line in login.run("list").stdout.splitlines() if line.startswith(job))
    return row, line


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def test_the_first_failure_is_the_reason(login: Login, case: Case) -> None:
    (login.folder / "x.py").write_text(case.program)
    launcher = login.folder / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    setup = {"setup": list(case.setup)} if case.setup else {}
    (login.folder / "own").mkdir()
    profile = login.lab.profile(
        login.folder / "own", python=str(launcher), run_root=str(login.folder / "runs"), **setup
    )
    asked = ["submit", "--cluster", str(profile), "--nodes", "2", "--gpus-per-node", "2"]
    done = login.run(*asked, "--json", "--", "x.py")
    assert done.returncode == 0, done.stderr
    row, line = failure_of(login, json.loads(done.stdout)["job"])
    failure = row["failure"]
    assert re.fullmatch(case.cause, failure["cause"]), row
    if not case.everywhere:
        assert (failure["rank"], failure["node"], failure["host"]) == (3, 1, "node2")
    assert row["reason"] == f"rank {failure['rank']} (node {failure['node']}): {failure['cause']}"
    assert line.endswith(row["reason"])
