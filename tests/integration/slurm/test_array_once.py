"""However the submission of an array goes wrong, every run has one job, or none. Oracle: what ran, and the queue."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.slurm.login import KILL_GPTCTL, KILL_SUBMITTER, TINY, Login, await_true, ran
from tests.lab import Lab

RUNS = 4
SWEEP = "parameters: {Engine.max_steps: [2, 3, 4, 5]}\nparallel: 3\n"


@pytest.fixture
def login(lab: Lab) -> Login:
    login = Login(lab)
    (login.folder / "sweep.yaml").write_text(SWEEP)
    return login


def submit(login: Login) -> list[str]:
    profile = str(login.folder / "quick/clusters/lab.yaml")
    overrides = [word for key in TINY for word in ("-o", key)]
    return ["sweep", "submit", "sweep.yaml", "--cluster", profile, *overrides]


def resumed(login: Login) -> list[dict]:
    """All runs of the only sweep, complete: what is missing is submitted."""
    (sweep,) = login.json("sweep", "list")
    login.json("sweep", "resume", sweep["sweep"])
    deadline = time.monotonic() + 120
    while True:
        rows = login.json("sweep", "show", sweep["sweep"])["runs"]
        if all(row["state"] == "COMPLETED" for row in rows):
            return rows
        assert time.monotonic() < deadline, str([(row["run"], row["state"], row["reason"]) for row in rows])
        time.sleep(0.5)


def assert_once(login: Login, runs: int = RUNS) -> None:
    """Every job ran once; nothing waits in the queue, and no folder is left of what was taken back."""
    jobs = login.json("list", "--all")
    assert len(jobs) == runs
    folders = {job["job"]: Path(login.json("status", job["job"])["run_dir"]) for job in jobs}
    assert all(len(ran({"run_dir": folder})) == 1 for folder in folders.values())
    assert not [job for job in login.jobs_in_slurm() if job[1] == "PENDING"]
    left = {entry.name for entry in (login.folder / "runs").glob("*")} - {"latest"} - set(folders)
    arrays = {name for name in left if "-array-" in name}
    assert left == arrays
    assert len(arrays) <= 1


STEPS = {
    "before sbatch": ("sbatch", KILL_SUBMITTER),
    "after sbatch": ("sbatch", f'"$LAB_REAL" "$@"; {KILL_SUBMITTER}'),
    "before release": ("scontrol", f'[ "$1" = release ] || exec "$LAB_REAL" "$@"; {KILL_GPTCTL}'),
    "after release": ("scontrol", f'[ "$1" = release ] || exec "$LAB_REAL" "$@"; "$LAB_REAL" "$@"; {KILL_GPTCTL}'),
}


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step == "before release" else pytest.mark.long) for step in STEPS]
)
def test_gptctl_is_killed(login: Login, step: str) -> None:
    """An array that was not released is taken back as a whole, one that was is adopted as a whole."""
    client, body = STEPS[step]
    login.lab.break_client(client, body)
    assert login.run(*submit(login)).returncode != 0
    login.lab.restore_client(client)
    known = login.json("list", "--all")
    assert len(known) == (RUNS if step == "after release" else 0)
    if not known:
        assert not any((login.folder / "runs").glob("*"))
    resumed(login)
    assert_once(login)


@pytest.mark.long
def test_every_moment_of_a_submission(login: Login) -> None:
    """Ctrl-C and kill -9 at random moments; `sweep resume` submits what is missing."""
    generator = random.Random(5)
    begin = time.monotonic()
    assert login.run(*submit(login)).returncode == 0
    whole = time.monotonic() - begin
    resumed(login)
    for number in range(8):
        other = Login(login.lab)
        (other.folder / "sweep.yaml").write_text(SWEEP)
        process = other.start(*submit(other))
        time.sleep(whole * generator.uniform(0.2, 1))
        # It may have exited already.
        with suppress(IndexError, OSError):
            other.lab.signal(process, signal.SIGINT if number % 2 else signal.SIGKILL)
        process.wait()
        other.json("list", "--all")
        if other.json("sweep", "list"):
            resumed(other)
            assert_once(other)
        else:
            assert_once(other, 0)


@pytest.mark.long
def test_lost_requests_and_replies(login: Login) -> None:
    """Of all connections every fifth is spoilt: its request or its reply is lost."""
    faults = 0
    for seed in range(6):
        other = Login(login.lab)
        (other.folder / "sweep.yaml").write_text(SWEEP)
        other.lab.proxy(f"random 0.25 {seed}")
        done = other.run(*submit(other), timeout=300)
        faults += other.lab.faults()
        other.lab.proxy("pass")
        assert "Traceback" not in done.stderr
        assert "bug:" not in done.stderr
        # A sweep that was taken back as a whole is not listed.
        if other.json("sweep", "list"):
            resumed(other)
            assert_once(other)
        else:
            assert_once(other, 0)
    assert faults


@pytest.mark.long
def test_two_resumes_at_once(login: Login) -> None:
    login.lab.break_client("sbatch", KILL_SUBMITTER)
    login.run(*submit(login))
    login.lab.restore_client("sbatch")
    (sweep,) = login.json("sweep", "list")
    both = [login.start("sweep", "resume", sweep["sweep"]) for _ in range(2)]
    codes = sorted(process.wait() for process in both)
    assert codes[0] == 0
    resumed(login)
    assert_once(login)


# After this file exists, no command of Slurm answers on the login node; jobs that run are not disturbed.
SILENT = 'if [ $LAB_HOST = head ] && [ -e {silent} ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi; '
# These runs differ for Slurm, too: they are submitted one by one.
DIFFERENT = "parameters: {Launch.slurm.extra.nice: [1, 2, 3, 4]}\n"


@pytest.mark.long
@pytest.mark.parametrize(("text", "last"), [(SWEEP, 1), (DIFFERENT, 4)], ids=["array", "one by one"])
def test_slurm_accepts_a_run_and_becomes_silent(login: Login, text: str, last: int) -> None:
    """The answer to the last sbatch is lost, and nothing tells whether the job exists: it does, and is held.

    A resume while Slurm is silent leaves it alone; one when it answers again submits it once.
    """
    (login.folder / "sweep.yaml").write_text(text)
    silent, count = login.folder / "silent", login.folder / "count"
    silence = SILENT.format(silent=silent)
    for client in ("squeue", "scontrol", "scancel", "sacct"):
        login.lab.break_client(client, f'{silence}exec "$LAB_REAL" "$@"')
    falls_silent = f"if [ $(wc -l < {count}) = {last} ]; then touch {silent}; {silence} fi"
    login.lab.break_client("sbatch", f'{silence}"$LAB_REAL" "$@"; echo >> {count}; {falls_silent}')
    process = login.start(*submit(login), stderr=subprocess.PIPE)
    await_true(silent.exists, 60)
    if last > 1:
        # Ctrl-C; the other one waits until its time is over.
        login.lab.signal(process, signal.SIGINT)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 3, errors
    assert "gptctl sweep resume" in errors
    (name,) = [each["sweep"] for each in login.json("sweep", "list")]
    assert login.json("sweep", "resume", name)["jobs"] == []
    assert len(count.read_text().splitlines()) == last
    silent.unlink()
    for client in ("squeue", "scontrol", "scancel", "sacct", "sbatch"):
        login.lab.restore_client(client)
    resumed(login)
    assert_once(login)
