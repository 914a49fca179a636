"""Which rank failed first, and why, in everything that gptctl says. Oracle: the rank and the failure that the test chose."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.local.causes import CASES, LAUNCHER, LOST_FIRST, Case

# Without torchrun a job takes half a second. These are the kinds that differ most.
QUICK = ("exception", "hostile text", "SIGKILL", "lost connection elsewhere", "setup fails")


def write_job(jobs, case: Case, python: str) -> None:
    program = case.program
    if case.name == "lost connection elsewhere":
        program = program.replace("\nif failing:", f"{LOST_FIRST}if failing:")
    (jobs.folder / "x.py").write_text(program)
    setup = f"setup: {json.dumps(case.setup)}\n" if case.setup else ""
    profile = f"kind: local\nrun_root: ./runs\n{setup}"
    (jobs.folder / "here.yaml").write_text(profile + (f"python: {python}\n" if python else ""))


def check(jobs, case: Case, job: str) -> None:
    """The same rank and cause in every answer."""
    waited = jobs.gptctl("wait", job)
    assert waited.returncode == 1
    row = next(row for row in json.loads(jobs.gptctl("list", "--json").stdout) if row["job"] == job)
    failure = row["failure"]
    assert failure, row
    assert re.fullmatch(case.cause, failure["cause"]), failure
    if not case.everywhere:
        assert (failure["rank"], failure["node"]) == (case.rank, case.node), failure
    assert (failure["exit"], failure["signal"]) == (case.exit, case.signal), failure
    who = f"node {failure['node']}" if case.rank is None else f"rank {failure['rank']} (node {failure['node']})"
    reason = f"{who}: {failure['cause']}"
    assert (row["state"], row["reason"]) == ("FAILED", reason)
    assert waited.stdout == f"{job}: FAILED: {reason}\n"
    assert jobs.gptctl("list").stdout.splitlines()[-1].endswith(reason)
    status = jobs.status(job)
    assert (status["reason"], status["failure"]) == (reason, failure)
    assert sorted(status["exit_codes"]) == ["0", "1"]  # of every node, also of one that was stopped


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_the_first_failure_is_the_reason(jobs, case: Case) -> None:
    launcher = jobs.folder / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    write_job(jobs, case, case.python or str(launcher))
    job = jobs.submit("--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    check(jobs, case, job)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_failure_with_the_real_torchrun(jobs, case: Case) -> None:
    write_job(jobs, case, case.python)
    job = jobs.submit("--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    check(jobs, case, job)
