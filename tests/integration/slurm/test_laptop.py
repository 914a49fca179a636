"""Slurm from a machine that has no Slurm and no shared folder. Oracles: what ran on the cluster, the queue, the files there."""

from __future__ import annotations

import json
import shlex
import subprocess
import time

import pytest

from tests.integration.slurm.laptop import Cutter, Laptop
from tests.integration.slurm.login import await_true
from tests.lab import Lab


@pytest.fixture
def laptop(lab: Lab) -> Laptop:
    return Laptop(lab)


def test_a_job_from_its_submit_to_its_end(laptop: Laptop) -> None:
    """The reply of sbatch is lost; then follow, cancel and fetch. Every log of the job is on the laptop in the end."""
    assert laptop.on("laptop", "command -v sbatch squeue; ls -A /etc/slurm") == ""
    lose_connection(laptop, "after sbatch")
    job = laptop.submit_quick("--nodes", "2", JOB_SECONDS="60")["job"]
    follower = laptop.start("logs", job, "--follow", stdout=subprocess.PIPE)
    await_true(lambda: len(laptop.ran(job)) == 2, 30)
    assert laptop.run("cancel", job).returncode == 0
    assert "Slurm job" in follower.communicate(timeout=30)[0]
    facts = laptop.json("status", job)
    assert facts["state"] == "CANCELLED"
    assert [state in ("PENDING", "RUNNING") for _, state, _ in laptop.jobs_in_slurm()] == [False]
    laptop.json("fetch", job)
    logs = "find logs -name '*.log' -exec sha256sum {} + | sort"
    there = laptop.on("head", f"cd {laptop.run_root}/{job} && {logs}").splitlines()
    here = laptop.on("laptop", f"cd {facts['run_dir']} && {logs}").splitlines()
    assert [] != there == [line for line in here if not line.endswith(" logs/batch.log")]  # that one was moved there


def assert_once(laptop: Laptop, accepted: int) -> None:
    """So many jobs ran, each once; nothing else is in the queue, and no folder is left of what was taken back."""
    jobs = [job["job"] for job in laptop.json("list", "--all")]
    for job in jobs:
        laptop.wait(job, "COMPLETED")
    assert len(jobs) == accepted
    assert [len(laptop.ran(job)) for job in jobs] == [1] * accepted
    assert laptop.folders() == set(jobs)
    assert [job for job in laptop.jobs_in_slurm() if job[1] == "PENDING"] == []


CUT = "pkill -KILL -u gpt -x sshd"  # the sessions of the user: the connection is lost
STEPS = {
    "before sbatch": ("sbatch", ""),
    "after sbatch": ("sbatch", '"$LAB_REAL" "$@";'),
    "before the release": ("scontrol", ""),
    "after the release": ("scontrol", '"$LAB_REAL" "$@";'),
}


def lose_connection(laptop: Laptop, step: str) -> None:
    """Once: the login host gets the request, and its reply is lost."""
    client, before = STEPS[step]
    once = f"{laptop.run_root}.cut"
    broken = f'[ -e {once} ] || {{ touch {once}; {before} {CUT}; exit 1; }}; exec "$LAB_REAL" "$@"'
    laptop.lab.break_client(client, broken)


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_the_connection_is_lost_at_a_step(laptop: Laptop, step: str) -> None:
    """gptctl connects again, and finds out what became of its request."""
    lose_connection(laptop, step)
    done = laptop.run(*laptop.quick())
    assert done.returncode == 0, done.stderr
    assert laptop.on("head", f"ls {laptop.run_root}.cut")
    assert_once(laptop, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_connections_cut_at_random_moments(lab: Lab, seed: int) -> None:
    """Each connection is cut with probability 2/3 while 20 jobs are submitted: once or not at all, and gptctl knows."""
    laptop = Laptop(lab)
    with Cutter(laptop) as cutter:
        laptop.write_profile("quick", python=laptop.stand_in, **cutter.profile)
        cutter.order(f"0.67 1.5 {seed}")
        codes = []
        for _ in range(20):
            done = laptop.run(*laptop.quick(), timeout=300)
            assert "Traceback" not in done.stderr
            codes.append(done.returncode)
        cutter.order("0 0 0")
        assert set(codes) <= {0, 3}
        assert_once(laptop, codes.count(0))
        print(f"20 submissions, {cutter.cuts()} cuts: {codes.count(0)} ran once, {codes.count(3)} not at all")
        assert cutter.cuts() >= 10
        assert codes.count(0) >= 10


@pytest.mark.long
def test_gptctl_is_killed_at_every_moment_of_a_submission(laptop: Laptop) -> None:
    """The next gptctl command completes or undoes what is left, here and on the cluster."""
    began = time.monotonic()
    assert laptop.run(*laptop.quick()).returncode == 0
    whole = time.monotonic() - began
    for part in range(8):
        process = laptop.start(*laptop.quick())
        time.sleep(whole * (part + 1) / 9)
        process.kill()
        process.wait()
    jobs = laptop.json("list", "--all")
    assert 1 <= len(jobs) <= 9
    assert_once(laptop, len(jobs))


@pytest.mark.long
def test_a_login_host_that_cannot_be_reached(laptop: Laptop) -> None:
    """Nothing hangs, nothing is left, and the last known state is shown; the host is named each time."""
    job = laptop.submit_quick(JOB_SECONDS="60")["job"]
    await_true(lambda: len(laptop.ran(job)) == 1, 30)
    assert laptop.json("list")[0]["state"] == "RUNNING"
    laptop.lab.cut("laptop")
    began = time.monotonic()
    (row,) = laptop.json("list")
    assert time.monotonic() - began < 20
    assert row["state"] == "UNKNOWN"
    assert "login host head" in row["reason"]
    assert "last known state: RUNNING" in row["reason"]
    refused = laptop.run(*laptop.quick(cluster="hpc"))
    assert refused.returncode == 3
    assert "login host head" in refused.stderr
    assert laptop.run("cancel", job).returncode == 3
    laptop.lab.restore("laptop")
    assert [row["state"] for row in laptop.json("list")] == ["RUNNING"]
    assert laptop.run("cancel", job, "--now").returncode == 0
    assert laptop.folders() == {job}


@pytest.mark.long
def test_the_users_own_ssh_connection_is_used(laptop: Laptop) -> None:
    """The laptop has no key any more, as where the login host asks for a code; without the master it is refused."""
    config = "Host hpc\n  HostName head\n  ControlPath ~/.ssh/master-%C\n"
    laptop.write("laptop", "/home/gpt/.ssh/config", config)
    laptop.write_profile("quick", python=laptop.stand_in, login="hpc")
    opened = laptop.lab.run("laptop", "ssh", "-fMN", "hpc", user="gpt", stdout=None, stderr=None)
    assert opened.returncode == 0
    try:
        laptop.on("laptop", "mv ~/.ssh/id_ed25519 ~/.ssh/away")
        done = laptop.run(*laptop.quick("--follow"))
        assert done.returncode == 0, done.stderr
        assert "[batch]" in done.stdout
        assert_once(laptop, 1)
        assert laptop.json("fetch")["files"] > 0
        laptop.on("laptop", "ssh -O exit hpc")
        refused = laptop.run(*laptop.quick())
        assert refused.returncode == 3
        assert "log in with ssh first" in refused.stderr
    finally:
        laptop.on("laptop", "mv ~/.ssh/away ~/.ssh/id_ed25519; rm ~/.ssh/config; ssh -O exit hpc")
    assert_once(laptop, 1)


@pytest.mark.long
def test_one_connection_and_few_queries(laptop: Laptop) -> None:
    """While a job is followed: one connection for everything, and Slurm is asked at most 12 times a minute."""
    with Cutter(laptop) as cutter:
        laptop.write_profile("quick", python=laptop.stand_in, **cutter.profile)
        before, began = laptop.lab.count_of("squeue"), time.monotonic()
        done = laptop.run(*laptop.quick("--follow", JOB_SECONDS="20"))
        assert done.returncode == 0, done.stderr
        assert cutter.connections() == 1
        assert laptop.lab.count_of("squeue") - before <= 12 * (time.monotonic() - began) / 60 + 1


@pytest.mark.long
def test_following_survives_cuts(laptop: Laptop) -> None:
    """Every line is shown once. Oracle: the log on the cluster."""
    laptop.write(
        "laptop",
        f"{laptop.folder}/count.py",
        "import time\nfor i in range(60): print(i, flush=True); time.sleep(0.2)\n",
    )
    with Cutter(laptop) as cutter:
        laptop.write_profile("hpc", **cutter.profile)
        submitted = laptop.run("submit", "--cluster", "hpc", "--json", "--", "count.py")
        job = json.loads(submitted.stdout)["job"]
        cutter.order("1 3 7")
        done = laptop.run("logs", job, "--follow", timeout=200)
        cutter.order("0 0 0")
        assert done.returncode == 0, done.stderr
        assert cutter.cuts() >= 2
        lines = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[rank 0]")]
        assert lines == [str(number) for number in range(60)]


@pytest.mark.long
def test_a_training_and_a_secret(laptop: Laptop) -> None:
    """The bundled trainer runs from the folder that was sent; a secret of this environment arrives, and is in no file."""
    done = laptop.run(*laptop.train("--nodes", "2", "--follow", keys=("Engine.max_steps=3",)))
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = laptop.json("fetch", "--to", f"{laptop.folder}/mine")
    assert fetched["files"] > 4
    assert "step_3" in laptop.on("laptop", f"ls {laptop.folder}/mine/output")
    program = "import os; assert os.environ['GPTCTL_CHECKPOINT_KEY'] == os.environ['CHECK'][::-1]\n"
    laptop.write("laptop", f"{laptop.folder}/secret.py", program)
    word = "s'3 $x\""
    keys = ("-o", "Launch.secrets.GPTCTL_CHECKPOINT_KEY.env=MINE", "--env", f"CHECK={word[::-1]}")
    done = laptop.run("submit", "--cluster", "hpc", "--follow", *keys, "--", "secret.py", MINE=word)
    assert done.returncode == 0, done.stdout + done.stderr
    for machine, place in (("head", laptop.run_root), ("laptop", laptop.folder)):
        assert laptop.on(machine, f'grep -rlF "s\'3 " {place}') == ""


@pytest.mark.long
def test_a_chain_and_a_job_after_it(laptop: Laptop) -> None:
    """Slurm keeps the order while the laptop is away; the second job finds that the training is complete."""
    trained = f"{laptop.run_root}-trained"
    laptop.write("head", f"{trained}/status.json", "")  # creates the folder
    variables = ("--env", "JOB_EXIT=5", "--env", f"JOB_TRAINED={trained}")
    words = laptop.train("--json", "--chain", "2", *variables, keys=(f"Engine.save_load.output_dir={trained}",))
    done = laptop.run(*["quick" if word == "hpc" else word for word in words])
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = json.loads(done.stdout)["chain"]
    last = laptop.submit_quick("--after", f"{first}:fail", "--after", second)["job"]
    assert laptop.wait(last, "COMPLETED", "FAILED", "CANCELLED")["state"] == "COMPLETED"
    assert laptop.json("status", first)["state"] == "FAILED"
    facts = laptop.json("status", second)
    assert (facts["state"], facts["reason"]) == ("COMPLETED", "training was already complete")
    assert laptop.ran(second) == []


@pytest.mark.long
def test_hostile_values_arrive_unchanged(laptop: Laptop) -> None:
    """Arguments, environment, comment and the name of the folder, through ssh and sbatch; nothing is executed."""
    canary = f"{laptop.run_root}.canary"
    hostile = f"'\"$(touch {canary})`touch {canary}`;touch {canary} %h %j é ~ * -n !! \\"
    root = f"{laptop.run_root}/{hostile.replace('/', '_').replace(chr(92), '')}"
    laptop.write_profile("hpc", run_root=root)
    program = "import json, os, sys\njson.dump([sys.argv[1], os.environ['V']], open('words', 'w'))\n"
    laptop.write("laptop", f"{laptop.folder}/words.py", program)
    words = ("--env", f"V={hostile}", "--comment", hostile[:-1], "--follow", "--", "words.py", hostile)
    done = laptop.run("submit", "--cluster", "hpc", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = laptop.on("head", f"cat {shlex.quote(root)}/*/code/words")
    assert json.loads(found) == [hostile, hostile]
    fetched = laptop.json("fetch", "--to", f"{laptop.folder}/{hostile.replace('/', '_')}")
    copied = laptop.on("laptop", f"cd {shlex.quote(fetched['folder'])} && cat work/words")
    assert json.loads(copied) == [hostile, hostile]
    for machine in ("head", "laptop"):
        assert laptop.on(machine, "find / -xdev -name '*.canary' 2> /dev/null") == ""
