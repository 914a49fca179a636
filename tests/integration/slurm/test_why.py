"""`gptctl why` of pending jobs on a real Slurm. Oracles: what each test does to the cluster, and the number of Slurm's commands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.slurm.laptop import Laptop
from tests.integration.slurm.login import Login, await_true
from tests.lab import Lab


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def waiting(login: Login, job: dict[str, Any], *reasons: str) -> dict[str, Any]:
    """What `why` says of a job, once Slurm gives one of these reasons; at most five of Slurm's commands were run for it."""
    found: dict[str, Any] = {}

    def has_come() -> bool:
        before = len(login.lab.calls())
        facts = login.json("why", job["job"])
        assert len(login.lab.calls()) - before <= 5
        assert facts["state"] == "PENDING", facts
        assert facts["explained"], facts
        found.update(facts["waiting"])
        return str(found["reason"]).startswith(reasons)

    await_true(has_come, 40, lambda: str(found))
    return found


def test_a_job_that_waits_for_all_nodes(login: Login) -> None:
    """And a third one behind it, which one job comes before."""
    first = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "20", JOB_SECONDS="90")
    login.wait(first["job"], "RUNNING")
    second = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "2")
    third = login.submit_quick("--nodes", "2", "--time", "2")
    found = waiting(login, second, "Resources")
    assert found["cause"] == "the nodes, GPUs or memory that it needs are in use"
    assert (found["partition"], found["nodes_wanted"]) == ("main", 4)
    assert (found["nodes_idle"], found["nodes_unusable"], found["nodes_total"]) == (0, 0, 4)
    assert (found["ahead"], found["pending"], found["never_starts"]) == (0, 2, False)
    assert waiting(login, third, "Priority", "Resources")["ahead"] == 1
    shown = login.run("why", second["scheduler_id"])
    assert shown.returncode == 0
    assert "it needs 4; 0 of 4 in main are idle" in shown.stdout


@pytest.mark.long
def test_fewer_nodes_would_start_now(login: Login) -> None:
    first = login.submit_quick("--nodes", "2", "--sbatch", "exclusive", "--time", "20", JOB_SECONDS="120")
    login.wait(first["job"], "RUNNING")
    job = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "20")
    found = waiting(login, job, "Resources")
    assert found["nodes_idle"] == 2
    assert [(each["option"], each["start"]) for each in found["sooner"]] == [("--nodes 2", "")]
    before = login.jobs_in_slurm()
    shown = login.run("why", job["job"]).stdout
    assert f"gptctl rerun {job['job']} --nodes 2" in shown
    assert login.jobs_in_slurm() == before  # nothing was submitted
    # What it recommends is true.
    assert login.run("cancel", job["job"]).returncode == 0
    again = login.json("rerun", job["job"], "--nodes", "2")
    login.wait(again["job"], "RUNNING", "COMPLETED", seconds=20)


@pytest.mark.long
def test_a_shorter_time_limit_would_start_in_the_gap(login: Login) -> None:
    """Two nodes are idle until a job that needs all four: only a short one may run there meanwhile."""
    first = login.submit_quick("--nodes", "2", "--sbatch", "exclusive", "--time", "10", JOB_SECONDS="150")
    login.wait(first["job"], "RUNNING")
    second = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "20")
    waiting(login, second, "Resources")
    third = login.submit_quick("--nodes", "2", "--sbatch", "exclusive", "--time", "30")
    found: dict[str, Any] = {}

    def is_planned() -> bool:  # by the backfill scheduler, for the second job
        found.update(waiting(login, third, "Priority", "Resources"))
        return bool(found["sooner"])

    await_true(is_planned, 60, lambda: str(found))
    assert found["ahead"] == 1
    option = found["sooner"][0]["option"].split()
    assert option[0] == "--time"
    assert 6 <= int(option[1]) <= 9
    # What it recommends is true.
    assert login.run("cancel", third["job"]).returncode == 0
    again = login.json("rerun", third["job"], *option)
    login.wait(again["job"], "RUNNING", "COMPLETED", seconds=20)


@pytest.mark.long
def test_reasons_that_somebody_has_to_change(login: Login) -> None:
    begin = login.submit_quick("--sbatch", "begin=now+500")
    assert "start time has not come" in waiting(login, begin, "BeginTime")["cause"]
    after = login.submit_quick("--after", begin["job"])
    assert waiting(login, after, "Dependency")["cause"] == "it waits for another job to end"
    held = login.submit_quick("--sbatch", "begin=now+500")
    login.slurm("scontrol", "hold", held["scheduler_id"])
    found = waiting(login, held, "JobHeldAdmin", "JobHeldUser")
    assert found["sooner"] == []
    login.slurm("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=test")
    away = login.submit_quick("--nodelist", "node4")
    found = waiting(login, away, "ReqNodeNotAvail", "Resources", "BadConstraints")
    assert (found["nodes_unusable"], found["nodes_total"]) == (1, 4)
    blocker = login.submit_quick("--nodes", "3", "--sbatch", "exclusive", "--time", "5", JOB_SECONDS="60")
    login.wait(blocker["job"], "RUNNING")
    job = login.submit_quick("--nodes", "2", "--time", "5")
    login.slurm("scontrol", "update", "PartitionName=main", "MaxTime=2")
    try:
        found = waiting(login, job, "PartitionTimeLimit")
        assert found["never_starts"]
        assert "shorter --time" in found["fix"]
    finally:
        login.slurm("scontrol", "update", "PartitionName=main", "MaxTime=1-0")


@pytest.mark.long
def test_slurm_that_does_not_answer(login: Login) -> None:
    """The other commands hang: the reason in words is there after one of them."""
    job = login.submit_quick("--sbatch", "begin=now+500")
    waiting(login, job, "BeginTime")
    login.lab.break_client("sinfo", "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1")
    facts = login.json("why", job["job"])
    assert facts["explained"]
    assert facts["waiting"]["priority"] is not None
    assert "Unable to contact slurm controller" in facts["waiting"]["not_asked"]
    login.lab.restore_client("sinfo")


@pytest.mark.long
def test_through_a_login_host(lab: Lab) -> None:
    laptop = Laptop(lab)
    job = laptop.submit_quick("--sbatch", "begin=now+500")
    before = len(lab.calls())
    facts = laptop.json("why", job["job"])
    assert len(lab.calls()) - before <= 5
    assert (facts["state"], facts["waiting"]["nodes_total"]) == ("PENDING", 4)
    assert facts["waiting"]["reason"] in ("BeginTime", "None", "Priority")


@pytest.mark.long
def test_a_failed_job(login: Login) -> None:
    job = login.submit_quick("--nodes", "2", JOB_EXIT="7")
    login.wait(job["job"], "FAILED")
    done = login.run("why", job["job"])
    assert done.returncode == 1
    assert "first  node 0" in done.stdout
    killed = login.submit_quick("--nodes", "2", JOB_KILLED="1")
    login.wait(killed["job"], "FAILED")
    facts = login.json("why", killed["job"])
    assert (facts["failure"]["node"], facts["likely_cause"]["code"]) == (1, "K052")
