"""Which rank failed first, and why, in everything that gptctl says. Oracle: the rank and the failure that the test chose."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gptctl.engine.run_folder import RunFolder
from tests.integration.local.causes import CASES, LAUNCHER, LOST_FIRST, Case
from tests.integration.slurm.login import TINY

# Without torchrun a job takes half a second. These are the kinds that differ most.
QUICK = ("exception", "hostile text", "SIGKILL", "lost connection elsewhere", "setup fails")
REAL = ("exception", "SIGKILL", "watcher killed", "syntax error", "no torch", "script missing")


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
    # Below torchrun's own opinion of the root cause.
    if case.name == "exception":
        for verb in (["logs", job, "--follow"], ["logs", job, "--errors"]):
            assert jobs.gptctl(*verb).stderr.splitlines()[-1] == f"{job}: FAILED: {reason}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.long) for case in CASES],
)
def test_the_first_failure_is_the_reason(jobs, case: Case) -> None:
    launcher = jobs.folder / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    write_job(jobs, case, case.python or str(launcher))
    job = jobs.submit("--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    check(jobs, case, job)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.name in REAL], ids=lambda case: case.name)
def test_the_first_failure_with_the_real_torchrun(jobs, case: Case) -> None:
    write_job(jobs, case, case.python)
    job = jobs.submit("--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    check(jobs, case, job)


TRAINER = [word for key in TINY for word in ("-o", key)]
WAITING = "import time\nprint('up', flush=True)\ntime.sleep(120)\n"
GLOO = """
import os, torch.distributed as dist, torch
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "3": raise ValueError("the real one")
for _ in range(10000): dist.all_reduce(torch.ones(1000))
"""


def row_of(jobs, job: str, state: str = "FAILED") -> dict:
    assert jobs.wait(job, 90) == state
    row = next(row for row in json.loads(jobs.gptctl("list", "--json").stdout) if row["job"] == job)
    # A table of a pipe is not cut.
    assert jobs.gptctl("list").stdout.splitlines()[-1].endswith(row["reason"])
    return row


def start_waiting(jobs, *options: str) -> str:
    (jobs.folder / "x.py").write_text(WAITING)
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "1", *options, "--", "x.py")
    jobs.await_text(job, 0, "up")
    jobs.await_text(job, 1, "up")
    return job


@pytest.mark.long
def test_a_killed_torchrun(jobs) -> None:
    job = start_waiting(jobs)
    os.kill(RunFolder(jobs.run_dir(job)).torchruns(0)[1], signal.SIGKILL)
    assert row_of(jobs, job)["reason"].startswith("node 1: torchrun killed by signal 9 (SIGKILL)")


@pytest.mark.long
def test_a_killed_node(jobs) -> None:
    """launch.sh and torchrun of node 1 are killed at once: nothing there can record anything."""
    job = start_waiting(jobs)
    torchrun = RunFolder(jobs.run_dir(job)).torchruns(0)[1]
    script = int(Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(script, signal.SIGKILL)
    os.kill(torchrun, signal.SIGKILL)
    row = row_of(jobs, job)
    assert row["failure"]["node"] == 1
    assert "killed by signal 9 (SIGKILL)" in row["reason"]


@pytest.mark.long
def test_a_rank_fails_after_the_supervisor_was_killed(jobs) -> None:
    """Nobody records the result; gptctl finds the cause in what the ranks recorded."""
    job = start_waiting(jobs)
    claim = json.loads((jobs.run_dir(job) / "claim.json").read_text())
    os.kill(claim["pid"], signal.SIGKILL)
    os.kill(jobs.pid(job, 1), signal.SIGABRT)
    os.kill(jobs.pid(job, 0), signal.SIGTERM)
    assert row_of(jobs, job)["reason"].startswith("rank 1 (node 1): killed by signal 6 (SIGABRT)")


@pytest.mark.long
def test_the_port_is_taken_after_the_check(jobs) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hold = f"import socket,time; s=socket.socket(); s.bind(('127.0.0.1',{port})); s.listen(); print('ok',flush=True); time.sleep(60)"
    setup = f"exec 9< <({sys.executable} -c {json.dumps(hold)}); read -r _ <&9"
    (jobs.folder / "here.yaml").write_text(f"kind: local\nrun_root: ./runs\nsetup: {json.dumps([setup])}\n")
    job = jobs.submit("--cluster", "./here.yaml", "-o", f"Launch.rdzv.port={port}", "--", "x.py")
    row = row_of(jobs, job)
    assert re.match(r"node 0: .*(EADDRINUSE|address already in use)", row["reason"]), row
    assert "Launch.rdzv.port" in row["failure"]["hint"]


@pytest.mark.long
def test_real_collectives_that_lose_a_rank(jobs) -> None:
    """The ranks of both nodes lose their connections when rank 3 fails; only it is named."""
    (jobs.folder / "x.py").write_text(GLOO)
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "2", "--", "x.py")
    assert row_of(jobs, job)["reason"] == "rank 3 (node 1): ValueError: the real one"


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (["Data.Train.dataset.path=short.txt"], r"rank 0 \(node 0\): .*short\.txt.*"),
        (["Engine.save_load.output_dir=/proc/nosuch"], r"rank 0 \(node 0\): .*/proc/nosuch.*"),
        (["Model.hidden_size=1048576", "Model.num_attention_heads=2"], r"rank 0 \(node 0\): .*[Mm]emory.*"),
    ],
    ids=["bad data", "unwritable output_dir", "too large a model"],
)
def test_failures_of_the_trainer(jobs, keys: list[str], cause: str) -> None:
    (jobs.folder / "config.yaml").write_text("Global: {seed: 1}\n")
    (jobs.folder / "short.txt").write_text("ab")
    job = jobs.submit(*TRAINER, *[word for key in keys for word in ("-o", key)])
    row = row_of(jobs, job)
    assert re.match(cause, row["reason"]), row


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_on_the_disk(jobs, small_disk: Path) -> None:
    (jobs.folder / "config.yaml").write_text("Global: {seed: 1}\n")
    keys = ["Engine.max_steps=2", f"Engine.save_load.output_dir={small_disk}/out"]
    row = row_of(jobs, jobs.submit(*TRAINER, *[word for key in keys for word in ("-o", key)]))
    assert re.match(r"rank 0 \(node 0\): cannot save the last checkpoint: not enough disk space", row["reason"]), row
    assert "another disk" in row["failure"]["hint"]


@pytest.mark.long
def test_a_full_disk_under_the_run_folder(jobs, small_disk: Path) -> None:
    """The log and the records of the rank are there, too: gptctl says what it can, and that the job failed."""
    (jobs.folder / "x.py").write_text(f"open('{small_disk}/runs/fill', 'wb').write(bytes(1 << 20))")
    (jobs.folder / "here.yaml").write_text(f"kind: local\nrun_root: {jobs.folder}/disk/runs\n")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    fill = f"head -c 16M /dev/zero > '{small_disk}/fill' 2> /dev/null; true"
    (jobs.folder / "x.py").write_text(f"import os\nos.system({fill!r})\nraise OSError(28, 'No space left on device')\n")
    job = jobs.submit("--cluster", "./here.yaml", "--", "x.py")
    assert row_of(jobs, job)["reason"].startswith("rank 0 (node 0): ")


@pytest.fixture
def small_group():
    """A control group with little memory, of either version."""
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"gptctl-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        (group / limit).write_text(str(160 << 20))
    except OSError as error:
        pytest.skip(f"cannot create a control group: {error.strerror}")
    yield group
    group.rmdir()


@pytest.mark.long
def test_the_out_of_memory_killer(jobs, small_group: Path) -> None:
    """A real one: the job runs in a control group with 160 MiB, and rank 3 takes more."""
    (jobs.folder / "launcher").write_text(LAUNCHER)
    (jobs.folder / "launcher").chmod(0o755)
    case = Case("memory", "data = [bytearray(b'x' * (1 << 20)) for _ in range(1 << 10)]", "")
    write_job(jobs, case, str(jobs.folder / "launcher"))
    enter = f'echo $$ > {small_group}/cgroup.procs && exec {Path(sys.executable).with_name("gptctl")} "$@"'
    asked = ["submit", "--json", "--cluster", "./here.yaml", "--nodes", "2", "--gpus-per-node", "2", "--", "x.py"]
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    done = subprocess.run(
        ["sh", "-c", enter, "gptctl", *asked], cwd=jobs.folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    row = row_of(jobs, json.loads(done.stdout)["job"])
    assert row["reason"] == "rank 3 (node 1): killed by the out-of-memory killer"
    assert "memory" in row["failure"]["hint"]
