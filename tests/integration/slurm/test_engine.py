"""The engine on a real Slurm whose clients or signals are unusual. Oracles: how often the ranks ran, and what Slurm lists."""

from __future__ import annotations

import time

from tests.integration.slurm.login import Login, await_true, ran
from tests.lab import Lab


def test_a_notice_before_the_answer_of_squeue_does_not_prevent_restarts(lab: Lab) -> None:
    lab.break_client("squeue", 'echo "NOTICE: maintenance on Friday"\nexec "$LAB_REAL" "$@"')
    try:
        login = Login(lab)
        job = login.submit_quick("--max-restarts", "2", "--no-requeue", JOB_EXIT="1")
        login.wait(job["job"], "FAILED")
        assert len(ran(job)) == 3
    finally:
        lab.restore_client("squeue")


def test_a_job_that_squeue_hides_is_cancelled_too(lab: Lab) -> None:
    login = Login(lab)
    job = login.submit_quick(JOB_SECONDS="60")
    await_true(lambda: bool(ran(job)), 30)
    lab.break_client("squeue", "exit 0")
    try:
        assert login.run("cancel", job["job"]).returncode == 0
    finally:
        lab.restore_client("squeue")
    await_true(lambda: login.jobs_in_slurm()[0][1] == "CANCELLED", 60, lambda: str(login.jobs_in_slurm()))


def test_signals_of_a_terminal_do_not_stop_the_engine(lab: Lab) -> None:
    """As on this machine and on ssh hosts."""
    login = Login(lab)
    job = login.submit_quick(JOB_SECONDS="4")
    await_true(lambda: bool(ran(job)), 30)
    for name in ("INT", "HUP"):
        login.slurm("scancel", f"--signal={name}", "--batch", str(job["scheduler_id"]))
        time.sleep(0.3)
    login.wait(job["job"], "COMPLETED")
    assert len(ran(job)) == 1
