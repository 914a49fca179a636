"""However a submission goes wrong, a job runs once or not at all, and gptctl knows which. Oracle: what ran, and the queue."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.integration.slurm.login import KILL_GPTCTL, KILL_SUBMITTER, Login, await_true, ran
from tests.lab import Lab


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def settled(login: Login) -> list[dict[str, object]]:
    """All jobs that gptctl knows, ended; what was left half-done is settled first."""
    jobs = login.json("list", "--all")
    for job in jobs:
        login.wait(job["job"], "COMPLETED")
    return login.json("list", "--all")  # type: ignore[no-any-return]


def assert_once(login: Login, accepted: int) -> None:
    """So many jobs ran, each once; nothing else is in the queue, and no folder is left of what was taken back."""
    jobs = settled(login)
    assert len(jobs) == accepted
    assert all(len(ran(job)) == 1 for job in jobs)
    folders = {Path(str(job["run_dir"])).name for job in jobs}
    assert {entry.name for entry in (login.folder / "runs").glob("*")} - {"latest"} == folders
    held = [job for job in login.jobs_in_slurm() if job[1] == "PENDING"]
    assert held == []


@pytest.mark.parametrize(
    ("submissions", "seed"), [(20, 1), pytest.param(200, 2, marks=pytest.mark.long)], ids=["20", "200"]
)
def test_lost_requests_and_replies(login: Login, submissions: int, seed: int) -> None:
    """Of the connections of all clients every fifth is spoilt: its request or its reply is lost."""
    login.lab.proxy(f"random 0.2 {seed}")
    accepted = refused = 0
    for _ in range(submissions):
        done = login.run(*login.quick("--nodes", "1", "--gpus-per-node", "1"), timeout=300)
        assert "Traceback" not in done.stderr
        accepted += done.returncode == 0
        refused += done.returncode == 3
    faults = login.lab.faults()
    login.lab.proxy("pass")
    assert accepted + refused == submissions
    assert_once(login, accepted)
    print(f"{submissions} submissions, {faults} faults: {accepted} ran once, {refused} refused; 0 duplicated, 0 lost")
    assert faults > submissions // 4
    assert accepted > submissions * 0.9


STEPS = {
    "before sbatch": ("sbatch", KILL_SUBMITTER, 0),
    "after sbatch": ("sbatch", f'"$LAB_REAL" "$@"; {KILL_SUBMITTER}', 0),
    "before release": ("scontrol", KILL_GPTCTL, 0),
    "after release": ("scontrol", f'"$LAB_REAL" "$@"; {KILL_GPTCTL}', 1),
}


@pytest.mark.parametrize("step", STEPS)
def test_gptctl_is_killed(login: Login, step: str) -> None:
    """A job that was not released is taken back by the next gptctl, one that was is adopted."""
    client, body, expected = STEPS[step]
    login.lab.break_client(client, body)
    killed = login.run(*login.quick())
    assert killed.returncode != 0
    login.lab.restore_client(client)
    assert_once(login, expected)


def test_every_moment_of_a_submission(login: Login) -> None:
    """gptctl is killed after some milliseconds, from its start to its end."""
    begin = time.monotonic()
    assert login.run(*login.quick()).returncode == 0
    whole = time.monotonic() - begin
    for part in range(8):
        process = login.start(*login.quick())
        time.sleep(whole * (part + 1) / 9)
        process.kill()
        process.wait()
    jobs = settled(login)
    assert all(len(ran(job)) == 1 for job in jobs)
    assert 1 <= len(jobs) <= 9
    assert not [job for job in login.jobs_in_slurm() if job[1] == "PENDING"]


def test_the_reply_of_sbatch_is_lost(login: Login) -> None:
    login.lab.proxy("drop-reply once")
    done = login.run(*login.quick())
    assert done.returncode == 0, done.stderr
    assert login.lab.faults()
    assert_once(login, 1)


def test_slurm_loses_a_job_before_it_is_released(login: Login) -> None:
    """As a controller does that is killed and begins again without its last seconds."""
    lost = login.folder / "lost"
    loses = f'"${{LAB_REAL%/*}}/scancel" "$2"; touch {lost}; echo "Invalid job id specified" >&2; exit 1'
    login.lab.break_client("scontrol", f'[ "$1" != release ] || {{ {loses}; }}; exec "$LAB_REAL" "$@"')
    login.lab.break_client("squeue", f'[ ! -e {lost} ] || exit 0; exec "$LAB_REAL" "$@"')
    done = login.run(*login.quick())
    assert done.returncode == 3
    assert "Invalid job id" in done.stderr
    assert login.json("list") == []
    assert not any((login.folder / "runs").glob("*"))


@pytest.mark.long
def test_a_controller_that_stops_for_a_while(login: Login) -> None:
    """Requests wait in its socket and are worked off later, when sbatch has given up long since."""
    login.lab.stop_controller()
    waker = threading.Timer(7, login.lab.continue_controller)
    waker.start()
    done = login.run(*login.quick())
    waker.join()
    assert done.returncode == 0, done.stderr
    assert_once(login, 1)


@pytest.mark.long
def test_a_controller_that_is_restarted(login: Login) -> None:
    login.lab.kill_controller()
    starter = threading.Timer(4, login.lab.start_controller)
    starter.start()
    done = login.run(*login.quick())
    starter.join()
    assert done.returncode == 0, done.stderr
    assert_once(login, 1)


@pytest.mark.long
def test_a_controller_that_stays_away(login: Login) -> None:
    """The submission fails in the end; nothing runs when the controller is back."""
    login.lab.kill_controller()
    done = login.run(*login.quick(), timeout=200)
    assert done.returncode == 3
    assert "it was not started" in done.stderr
    login.lab.start_controller()
    assert_once(login, 0)


def test_a_duplicate_does_nothing(login: Login) -> None:
    """Even when somebody submits the script of a job by hand: it has not the claim."""
    job = login.submit_quick()
    login.wait(job["job"], "COMPLETED")
    number = login.slurm("sbatch", "--parsable", f"{job['run_dir']}/job.sbatch").strip()
    await_true(lambda: "FAILED" in login.slurm("squeue", "-h", "-t", "all", "-j", number, "-o", "%T"), 20)
    assert len(ran(job)) == 1
    assert "gptctl abandoned it" in (Path(job["log_dir"]) / "batch.log").read_text()
