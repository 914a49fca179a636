"""How a job stands, asked of a Slurm that is slow, silent, forgetful or without accounting. Oracle: what was done to it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.integration.slurm.login import Login, await_true, ran
from tests.lab import Lab


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def test_pending_with_its_reason(login: Login) -> None:
    """And with the time at which Slurm expects to start it."""
    first = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "2", JOB_SECONDS="60")
    login.wait(first["job"], "RUNNING")
    second = login.submit_quick("--nodes", "4", "--sbatch", "exclusive", "--time", "2")
    known = re.compile(r"(Resources|Priority), expected to start 20\d\d-")
    await_true(lambda: bool(known.match(login.json("status", second["job"])["reason"])), 30)
    rows = {row["job"]: row for row in login.json("list")}
    assert (rows[first["job"]]["state"], rows[second["job"]]["state"]) == ("RUNNING", "PENDING")
    assert login.run("status", second["scheduler_id"]).stdout.startswith(f"job {second['job']}")


def test_one_query_for_all_jobs(login: Login) -> None:
    for _ in range(3):
        login.submit_quick("--sbatch", "begin=now+100")
    before = len(login.lab.calls())
    assert [row["state"] for row in login.json("list")] == ["PENDING"] * 3
    assert [name for _, name in login.lab.calls()[before:]] == ["squeue"]


def test_following_asks_seldom(login: Login) -> None:
    """At most 12 questions a minute for each of two followers, of a job with 2 ranks and of one with 1,024.

    The logs of both are made here: what their ranks say does not matter to Slurm.
    """
    jobs = {ranks: login.submit_quick("--nodes", "2", JOB_SECONDS="100") for ranks in (2, 1024)}
    for ranks, job in jobs.items():
        login.wait(job["job"], "RUNNING")
        logs = Path(job["log_dir"]) / "attempt-0"
        await_true(logs.is_dir, 20)
        for rank in range(ranks):
            (logs / f"workerlog.{rank}").write_text(f"I am {rank}\n")
    before, followers, seconds = len(login.lab.calls()), [], 11
    for ranks, job in jobs.items():
        with (login.folder / f"shown-{ranks}").open("w") as out:
            followers.append(login.start("logs", job["job"], "--follow", stdout=out))
    time.sleep(seconds)
    asked = [name for _, name in login.lab.calls()[before:]]
    for follower in followers:
        assert follower.poll() is None
        follower.kill()
        follower.wait()
    assert set(asked) == {"squeue"}
    assert 4 <= len(asked) <= 2 * (1 + seconds * 12 / 60)
    for ranks in jobs:
        assert (login.folder / f"shown-{ranks}").read_text().count("I am ") == ranks


@pytest.mark.long
def test_a_silent_controller_is_waited_for(login: Login) -> None:
    """Killed and started again while a job is followed: that is no end of the job, and its end is seen later."""
    job = login.submit_quick(JOB_SECONDS="100")
    login.wait(job["job"], "RUNNING")
    login.lab.await_saved()
    with (login.folder / "said").open("w") as err:
        follower = login.start("logs", job["job"], "--follow", stderr=err)
    login.lab.kill_controller()
    said = login.run("status", job["job"])
    assert said.returncode == 0
    assert re.search(r"UNKNOWN: Slurm has not answered since \d\d:\d\d:\d\d: ", said.stdout), said.stdout
    login.lab.start_controller()
    assert follower.poll() is None
    assert login.run("cancel", "--now", job["job"]).returncode == 0
    assert follower.wait(30) == 1
    assert "CANCELLED" in (login.folder / "said").read_text()


def hang(login: Login, *clients: str) -> None:
    """What a script around a client starts hangs, too, and keeps its output open."""
    for client in clients:
        login.lab.break_client(client, "sleep 200; exit 1")


def timed(login: Login, *words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    done = login.run(*words, timeout=300)
    print(f"gptctl {' '.join(words)}: {time.monotonic() - began:.1f} s, exit {done.returncode}")
    assert "Traceback" not in done.stderr
    return done, time.monotonic() - began


def test_a_command_of_slurm_that_hangs_does_not_hang_list(login: Login) -> None:
    """`list` waits 3 s, and shows the last known state with its age. Oracle: the clock."""
    job = login.submit_quick("--sbatch", "begin=now+100")
    assert login.json("list")[-1]["state"] == "PENDING"
    hang(login, "squeue", "sacct")
    done, took = timed(login, "list")
    assert took < 3 + 2
    assert re.search(rf"{job['job']} +PENDING \(\d+ s ago\) .*squeue got no answer in 2\.\d+ s", done.stdout), (
        done.stdout
    )
    login.lab.restore_client("squeue")
    login.lab.restore_client("sacct")


@pytest.mark.long
def test_a_command_of_slurm_that_hangs_is_waited_for_once(login: Login) -> None:
    """Three jobs: each command ends 30 s later at most, and says which command of Slurm did not answer."""
    jobs = [login.submit_quick("--sbatch", "begin=now+500")["job"] for _ in range(3)]
    hang(login, "squeue", "sacct", "scancel", "scontrol")
    for words, code in ((("status", jobs[0]), 0), (("cancel", *jobs), 3), (("rm", "--yes", jobs[1]), 3)):
        done, took = timed(login, *words)
        assert took < 30 + 5
        assert done.returncode == code
        assert "squeue got no answer in 30 s" in done.stdout + done.stderr
    for client in ("squeue", "sacct", "scancel", "scontrol"):
        login.lab.restore_client(client)
    assert timed(login, "cancel", *jobs)[0].returncode == 0


@pytest.mark.long
def test_a_stopped_controller_does_not_hang_status(login: Login) -> None:
    job = login.submit_quick("--sbatch", "begin=now+100")
    login.lab.stop_controller()
    said = login.run("status", job["job"], timeout=60)
    assert "UNKNOWN: Slurm has not answered" in said.stdout
    login.lab.continue_controller()
    assert login.state(job["job"]) == "PENDING"


@pytest.mark.long
def test_a_job_that_slurm_forgot(login: Login) -> None:
    """A controller that was killed may lose what it accepted in its last seconds: never a success, and it can be undone."""
    login.lab.await_saved()
    job = login.submit_quick("--sbatch", "begin=now+100")
    login.lab.kill_controller()
    login.lab.start_controller()
    if job["scheduler_id"] in [found[0] for found in login.jobs_in_slurm()]:
        pytest.skip("this controller saved it in time")
    facts = login.json("status", job["job"])
    assert facts["state"] == "LOST"
    assert "does not know job" in facts["reason"]
    another = login.submit_quick("--sbatch", "begin=now+100")
    assert login.state(job["job"]) == "LOST"  # though the other one may have got its number
    assert login.state(another["job"]) == "PENDING"
    assert login.run("cancel", job["job"]).returncode == 0


def test_ends_that_only_slurm_knows(login: Login) -> None:
    job = login.submit_quick(JOB_SECONDS="100")
    await_true(lambda: bool(ran(job)), 30)
    login.lab.run(login.json("status", job["job"])["hosts"][0], "pkill", "-9", "-f", "engine.pyz srun_node", check=True)
    facts = login.wait(job["job"], "FAILED", "NODE_FAIL")
    assert "signal 9" in facts["reason"] or "exit code" in facts["reason"], facts


def test_scontrol_is_missing_inside_the_job(login: Login) -> None:
    login.lab.break_client("scontrol", 'case $(hostname) in head) exec "$LAB_REAL" "$@" ;; esac; exit 127')
    job = login.submit_quick("--nodes", "2")
    facts = login.wait(job["job"], "FAILED")
    assert facts["reason"].startswith("scontrol cannot list the hosts of node[")
    assert not ran(job)


def test_a_host_whose_name_is_loopback(login: Login) -> None:
    """As Debian writes it into /etc/hosts: a clear stop, never a world of one node."""
    own = f"sed 's/10.77.0.11/127.0.1.1/' /etc/hosts > {login.folder}/hosts && mount --bind {login.folder}/hosts /etc/hosts"
    login.lab.run("node1", "sh", "-c", own, check=True)
    try:
        job = login.submit_quick("--nodes", "2", "--nodelist", "node[1-2]")
        facts = login.wait(job["job"], "FAILED")
    finally:
        login.lab.run("node1", "umount", "/etc/hosts", check=True)
    assert facts["reason"].startswith("cannot resolve node1 to an address that other nodes can reach")
    assert not ran(job)


def test_a_full_run_folder(lab: Lab) -> None:
    """A submission that does not fit leaves nothing; a job whose folder fills up is not called a success."""
    login = Login(lab, run_root=str(lab.small / "runs"))
    lab.run("head", "sh", "-c", f"head -c 20000000 /dev/zero > {lab.small}/filler", check=False)
    refused = login.run(*login.quick())
    assert refused.returncode == 3
    assert "No space left on device" in refused.stderr
    assert login.jobs_in_slurm() == []
    lab.run("head", "rm", f"{lab.small}/filler", check=True)
    job = login.submit_quick(JOB_SECONDS="4", JOB_EXIT="3")
    login.wait(job["job"], "RUNNING")
    lab.run("head", "sh", "-c", f"head -c 20000000 /dev/zero > {lab.small}/filler", check=False)
    await_true(lambda: login.state(job["job"]) == "FAILED", 30)
    lab.run("head", "sh", "-c", f"rm -rf {lab.small}/*", check=True)


HOSTILE = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=40)


@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.long)])
def test_hostile_values_through_the_real_sbatch(login: Login, examples: int) -> None:
    """Nothing is executed, nothing is altered: comment, environment, arguments, and folder names."""
    canary = login.folder / "canary"
    number = iter(range(10**6))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    @example("'", "", "\\\\J%%n{'>")  # what Slurm and YAML once took for their own
    @given(HOSTILE, HOSTILE, HOSTILE)
    def check(comment: str, value: str, argument: str) -> None:
        name = argument.replace("/", "_").replace("\\", "_")[
            :20
        ]  # of these two, Slurm would take the second for its own
        place = login.folder / f"{next(number)} '{name}\"%j$(touch canary)"
        place.mkdir()
        login.lab.profile(place, python=str(login.stand_in), run_root=str(place / "ru ns"))
        (place / "job.py").write_text("")
        words = [f"{comment}$(touch {canary})`touch {canary}`", f"{value};touch {canary}", f"{argument}|touch {canary}"]
        asked = ["submit", "--json", "--cluster", "lab", "--comment", words[0], "--env", f"V={words[1]}"]
        done = login.lab.run(
            "head", login.gptctl, *asked, "--", "job.py", words[2], cwd=str(place), env=login.env, check=False
        )
        assert done.returncode == 0, done.stderr
        job = json.loads(done.stdout)
        await_true(lambda: bool(ran(job)), 30, lambda: login.batch_log(job))
        assert ran(job)[0].endswith(f"{job['run_dir']}/code/job.py {words[2]}".strip())
        said = login.slurm("scontrol", "-o", "show", "job", job["scheduler_id"])
        assert words[0] in said
        assert f"export V={shlex.quote(words[1])}" in (Path(job["run_dir"]) / "launch.sh").read_text()

    check()
    refused = login.run(*login.quick("--log-dir", "with\\backslash"))
    assert refused.returncode == 1
    assert "S009 Launch.log_dir" in refused.stderr
    assert not list(login.folder.rglob("canary"))


def test_with_accounting_the_end_is_known_after_slurm_forgot(lab_with_accounting: Lab) -> None:
    """The controller is asked first; what it has forgotten, sacct knows."""
    login = Login(lab_with_accounting)
    job = login.submit_quick(JOB_SECONDS="100")
    login.wait(job["job"], "RUNNING")
    login.slurm("scancel", job["scheduler_id"])
    assert login.wait(job["job"], "CANCELLED")["ended"]
    (Path(job["run_dir"]) / "result.json").unlink()  # in which its end is kept once it was asked for
    login.lab.break_client("squeue", "exit 0")  # as if the controller had forgotten it
    await_true(lambda: login.state(job["job"]) == "CANCELLED", 30)
    (Path(job["run_dir"]) / "result.json").unlink()
    login.lab.break_client("sacct", "echo 'sacct: error: Problem talking to the database' >&2; exit 1")
    facts = login.json("status", job["job"])
    assert facts["state"] == "UNKNOWN"
    assert "Problem talking to the database" in facts["reason"]
    login.lab.break_client("sacct")  # not installed
    assert login.state(job["job"]) == "CANCELLED"  # as it was seen before
    (login.folder / "home" / "jobs" / f"{job['job']}.ended").unlink()
    assert login.state(job["job"]) == "LOST"
    login.lab.stop_accounting()
    login.lab.restore_client("squeue")
    assert login.state(job["job"]) == "CANCELLED"
