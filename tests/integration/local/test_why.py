"""`gptctl why` of real jobs on this machine. Oracles: the failure that each script makes, and what the jobs wait for."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from gptctl.text import clean
from tests.integration.local.causes import CASES, LAUNCHER, Case
from tests.integration.local.test_causes import write_job
from tests.reported import Elements
from trainer.logline import TrainLine

CODES = {
    "exception": None,
    "group": None,
    "hostile text": None,
    "import error": "K060",
    "disk full": "K043",
    "memory error": "K042",
    "cannot allocate": "K042",
    "wrong usage": "K064",
    "SIGKILL": "K052",
    "watcher killed": "K052",
    "SIGSEGV": "K078",
    "SIGABRT": "K080",
    "SIGTERM": "K097",
    "syntax error": "K063",
    "setup fails": "K065",
    "missing interpreter": "K066",
    "no torch": "K060",
    "script missing": "K075",
}
QUICK = ("disk full",)


def explained(jobs, *arguments: str) -> tuple[dict, int]:
    answer = jobs.gptctl("why", *arguments, "--json")
    return json.loads(answer.stdout), answer.returncode


def fail(jobs, case: Case) -> str:
    launcher = jobs.folder / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    write_job(jobs, case, case.python or str(launcher))
    job = jobs.submit("--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    assert jobs.ended(job) == ["FAILED"]
    return job


def assert_reported(jobs, job: str, why: dict) -> None:
    """The page of `gptctl report` tells the same failure, cause and fix, and the last lines of the log."""
    written = json.loads(jobs.gptctl("report", job, "--json").stdout)
    found = Elements(Path(written["file"]).read_text())
    assert len(found.of("article", "failure")) == 1
    text = " ".join(found.texts)
    if likely := why["likely_cause"]:
        assert likely["fix"] in text
        assert (likely["cause"] or "") in text
    last = json.loads(jobs.gptctl("logs", job, "--failed", "--json").stdout)["last_lines"]
    assert not last or clean(last[-1]) in text


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.long)
        for case in CASES
        if case.name in CODES
    ],
)
def test_the_likely_cause_of_real_failures(jobs, case: Case) -> None:
    """And the rank or node that `logs --failed` names first."""
    job = fail(jobs, case)
    facts, code = explained(jobs, job)
    likely = facts["likely_cause"]
    assert (likely and likely["code"]) == CODES[case.name], facts
    assert code == (0 if CODES[case.name] else 1)
    failed = json.loads(jobs.gptctl("logs", job, "--failed", "--json").stdout)
    first = failed["first"]["rank"] if failed["first"] else None
    assert (facts["failure"]["rank"], facts["failure"]["attempt"]) == (first, 0)
    if not case.everywhere:
        assert (first, facts["failure"]["node"]) == (case.rank, case.node)
    text = jobs.gptctl("why", job)
    assert text.returncode == code
    assert text.stdout.startswith(f"job {job}\n  state  FAILED: ")
    assert "\x1b" not in text.stdout
    assert_reported(jobs, job, facts)
    # The hint of `status` is the fix, unless only the logs tell it.
    if case.name not in QUICK:
        assert jobs.status(job)["failure"]["hint"] == (likely and likely["fix"])


def test_a_job_that_waits_runs_and_completes(jobs) -> None:
    """One job holds the machine, another one waits for it."""
    (jobs.folder / "quick").write_text('#!/bin/sh\nwhile [ ! -e "$OUT/go" ]; do sleep 0.05; done\n')
    first = jobs.quick("--env", f"OUT={jobs.folder}")
    second = jobs.quick("--queue", "--env", f"OUT={jobs.folder}")
    facts, code = explained(jobs, second)
    assert (facts["state"], code) == ("PENDING", 0)
    assert facts["waiting"]["reason"] == f"waits for {first} (1 of 1 in the queue)"
    assert "jobs that came before it" in facts["waiting"]["cause"]
    # Nothing has been measured of either, and their reports say so.
    for job, state in ((first, "running"), (second, "pending")):
        found = Elements(jobs.gptctl("report", job, "--output", "-").stdout)
        assert (len(found.of("span", state)), "No step has been logged." in found.texts) == (1, True)
    shown = jobs.gptctl("why", first)
    assert (shown.returncode, "it has logged no step yet" in shown.stdout) == (0, True)
    (jobs.folder / "go").touch()
    assert jobs.ended(first, second) == ["COMPLETED", "COMPLETED"]
    assert "it completed: there is nothing to fix" in jobs.gptctl("why").stdout


@pytest.mark.long
def test_a_job_of_a_folder_that_was_removed(jobs) -> None:
    """The history kept the first failure: its likely cause is known without any log."""
    case = next(case for case in CASES if case.name == "disk full")
    job = fail(jobs, case)
    assert jobs.wait(job) == "FAILED"
    assert jobs.gptctl("rm", "--yes", job).returncode == 0
    facts, code = explained(jobs, job)
    assert (facts["likely_cause"]["code"], code) == ("K043", 0)


@pytest.mark.long
def test_a_failure_that_nobody_recorded(jobs) -> None:
    """The supervisor is killed, then a rank aborts: both verbs name that rank."""
    (jobs.folder / "x.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "1", "--", "x.py")
    jobs.await_text(job, 0, "up")
    jobs.await_text(job, 1, "up")
    os.kill(json.loads((jobs.run_dir(job) / "claim.json").read_text())["pid"], signal.SIGKILL)
    os.kill(jobs.pid(job, 1), signal.SIGABRT)
    os.kill(jobs.pid(job, 0), signal.SIGTERM)
    assert jobs.wait(job) == "FAILED"
    facts, _ = explained(jobs, job)
    failed = json.loads(jobs.gptctl("logs", job, "--failed", "--json").stdout)
    assert facts["failure"]["rank"] == failed["first"]["rank"] == 1
    assert facts["likely_cause"]["code"] == "K080"


@pytest.mark.long
def test_a_rank_that_hangs_in_a_running_job(jobs) -> None:
    """It prints steps in the style of FleetX, then nothing: `why` compares the silence with its steps."""
    steps = [str(TrainLine(step, 0, step, 4.1, 0.1, 0.1, 10.0, 10, 10, 1e-4)) for step in (1, 2, 3)]
    script = "import os, time\n" + "".join(f"print({line!r}, flush=True)\n" for line in steps)
    script += "old = time.time() - 500\nfile = os.environ['GPTCTL_LOG_DIR'] + '/workerlog.0'\n"
    script += "os.utime(file, (old, old))\nprint(end='', flush=True)\nopen('done', 'w')\ntime.sleep(120)\n"
    (jobs.folder / "x.py").write_text(script)
    job = jobs.submit("--", "x.py")
    deadline = time.monotonic() + 40
    while not (jobs.folder / "done").exists():
        assert time.monotonic() < deadline, jobs.log(job, 0)
        time.sleep(0.05)
    shown = jobs.gptctl("why", job)
    assert shown.returncode == 0
    assert "no step for 8 min" in shown.stdout, shown.stdout
    assert f"gptctl stacks {job}" in shown.stdout
    jobs.gptctl("cancel", "--now", job)
