"""Jobs on a real Slurm. Oracles: Slurm's own words, the files of the ranks, and the same training without Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.slurm.login import TINY, Login, await_true, losses, ran
from tests.lab import Lab
from tests.modes import not_private
from tests.ranks import run as run_ranks

DUMP = """
import json, os, torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "NCCL_IB_TIMEOUT", "FROM_PROFILE", "FROM_CONFIG", "FROM_FLAG", "OMP_NUM_THREADS")
print("env", json.dumps({name: os.environ.get(name) for name in names} | {"host": os.uname().nodename}), flush=True)
dist.barrier()
"""


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


def test_two_nodes_train_as_one_process_would(login: Login, tmp_path: Path) -> None:
    """What is said and written of one job; Slurm has what the dry run printed, byte for byte."""
    overrides = [word for key in [*TINY, "Engine.max_steps=10"] for word in ("-o", key)]
    asked = ["submit", "--nodes", "2", "--cluster", "lab", *overrides]
    dry = json.loads(login.run(*asked, "--dry-run", "--json").stdout)["scripts"]["job.sbatch"]
    done = login.run(*asked, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = login.json("status")
    assert (facts["state"], facts["world_size"], facts["hosts"]) == ("COMPLETED", 4, ["node1", "node2"])
    logs = Path(facts["log_dir"]) / "attempt-0"
    names = {file.name for file in logs.iterdir()}
    assert names == {*(f"workerlog.{rank}" for rank in range(4)), "node.0.log", "node.1.log", "batch.log"}
    assert "total device num:4," in (logs / "workerlog.0").read_text()
    assert "[rank 3]" in done.stdout
    assert "[batch]" in done.stdout
    login.slurm("scontrol", "write", "batch_script", facts["scheduler_id"], str(login.folder / "has"))
    script = login.folder / "has"
    assert script.read_text() == dry == (Path(facts["run_dir"]) / "job.sbatch").read_text()
    alone = run_ranks(tmp_path, *TINY, "Engine.max_steps=10")
    assert alone.ok, alone.text
    here = list(losses(facts).values())
    assert len(here) == 10
    assert max(abs(a - b) for a, b in zip(here, alone.metrics())) <= 5e-6
    assert login.run("rm", facts["job"], "--yes").returncode == 0
    assert not Path(facts["run_dir"]).exists()
    after = login.json("status", facts["job"])
    assert (after["state"], after["hosts"], bool(after["removed"])) == ("COMPLETED", facts["hosts"], True)


def test_two_jobs_at_once_and_their_environments(lab: Lab) -> None:
    """On the same two nodes, each in a world of its own. The flag wins over the config, the config over the profile; what
    the caller's own job left in the environment does not come along."""
    profile = {"FROM_PROFILE": "p r", "FROM_CONFIG": "profile", "FROM_FLAG": "profile", "NCCL_IB_TIMEOUT": 22}
    login = Login(lab, env=profile)
    (login.folder / "dump.py").write_text(DUMP)
    (login.folder / "run.yaml").write_text("Launch: {env: {FROM_CONFIG: 'c,1;$HOME', FROM_FLAG: config}}\n")
    asked = [
        "submit",
        "run.yaml",
        "--nodes",
        "2",
        "--gpus-per-node",
        "1",
        "--cluster",
        "lab",
        "--nodelist",
        "node[1-2]",
    ]
    asked += ["--env", "FROM_FLAG=a\\'b\"c", "--json"]
    leaked = {"SLURM_CPU_BIND": "none", "SBATCH_PARTITION": "high", "OMP_NUM_THREADS": "77"}
    changes = {"a": (), "b": ("--env", "ONLY_B=1")}
    jobs = [
        json.loads(login.run(*asked, *more, "--name", name, "--", "dump.py", **leaked).stdout)
        for name, more in changes.items()
    ]
    facts = [login.wait(job["job"], "COMPLETED") for job in jobs]
    assert facts[0]["endpoint"] != facts[1]["endpoint"]
    for job in facts:
        assert job["hosts"] == ["node1", "node2"]
        logs = [(Path(job["log_dir"]) / f"attempt-0/workerlog.{rank}").read_text() for rank in range(2)]
        said = [json.loads(log.partition("env ")[2].splitlines()[0]) for log in logs]
        assert [(env["RANK"], env["host"]) for env in said] == [("0", "node1"), ("1", "node2")]
        for env in said:
            assert (env["FROM_PROFILE"], env["FROM_CONFIG"], env["FROM_FLAG"]) == ("p r", "c,1;$HOME", "a\\'b\"c")
            assert (env["NCCL_IB_TIMEOUT"], env["WORLD_SIZE"]) == ("22", "2")
            assert env["OMP_NUM_THREADS"] != "77"
        assert "Partition=main" in login.slurm("scontrol", "show", "job", job["scheduler_id"])
    found = login.run("diff", jobs[0]["job"], jobs[1]["job"])
    assert found.returncode == 1, found.stderr
    assert "ONLY_B" in found.stdout
    assert "FROM_FLAG" not in found.stdout
    login.run("list", "--prometheus", str(login.folder))
    (written,) = login.folder.glob("*.prom")
    assert re.search(r'gptctl_jobs\{[^}]*state="COMPLETED"[^}]*\} [2-9]', written.read_text())


def test_ten_nodes_are_numbered_as_slurm_counts_them() -> None:
    """node2 before node10; the stand-in notes what torchrun would be told."""
    with Lab(nodes=10) as lab:
        login = Login(lab)
        job = login.submit_quick("--nodes", "10", "--gpus-per-node", "1")
        login.wait(job["job"], "COMPLETED")
        told = {line.split()[1]: line.partition("--node-rank=")[2].split()[0] for line in ran(job)}
        assert told == {f"node{number + 1}": str(number) for number in range(10)}


def test_options_reach_slurm(login: Login) -> None:
    (login.folder / "quick/clusters/lab.yaml").open("a").write("sbatch: {nice: 5, mail-user: me@lab, mail-type: END}\n")
    options = ["--sbatch", "export=NONE"]
    options += [
        "--time",
        "7",
        "--comment",
        "it's mine",
        "--sbatch",
        "nice=9",
        "--sbatch",
        "exclusive",
        "--nodelist",
        "node3",
    ]
    job = login.submit_quick(*options, "--name", "x.y-z", JOB_SECONDS="30")
    said = login.slurm("scontrol", "show", "job", job["scheduler_id"])
    for word in ("JobName=x.y-z", "TimeLimit=00:07:00", "Nice=9", "ReqNodeList=node3", "OverSubscribe=NO", "it's mine"):
        assert word in said, said
    assert "Requeue=0" in said  # a script's author knows whether it can go on
    assert "MailUser=me@lab" in said
    await_true(lambda: bool(ran(job)), 20, lambda: login.batch_log(job))  # though nothing was exported
    assert "CPUs=4 " in login.slurm("scontrol", "show", "step", job["scheduler_id"])  # all of an exclusive node


def test_a_job_waits_for_another(login: Login) -> None:
    # The first one ends when the test says so, however long that takes.
    go = login.folder / "go"
    login.stand_in.write_text(f'#!/bin/bash\nwhile [ -n "$HOLD" ] && [ ! -e {go} ]; do sleep 0.1; done\n')
    first = login.submit_quick(HOLD="1")
    second = login.submit_quick("--after", first["job"])
    third = login.submit_quick("--after", first["scheduler_id"], "--after", second["job"])
    await_true(lambda: login.json("status", third["job"])["reason"] == "Dependency", 60)
    refused = login.run("submit", "--cluster", "local", "--after", third["job"], "--", "job.py")
    assert refused.returncode == 2
    assert f"--after {third['job']}: it runs on lab; a job on local cannot wait for it" in refused.stderr
    login.wait(first["job"], "RUNNING")
    assert {login.state(job["job"]) for job in (second, third)} == {"PENDING"}
    go.touch()
    login.wait(third["job"], "COMPLETED")
    ends = [json.loads((Path(job["run_dir"]) / "result.json").read_text())["ended"] for job in (first, second, third)]
    assert ends == sorted(ends)


def test_a_job_waits_for_one_that_does_not_complete(login: Login) -> None:
    """Whether it fails or is cancelled, and whatever else the user wants it to wait for."""
    failing = login.submit_quick(JOB_EXIT="5", JOB_SECONDS="2")
    cancelled = login.submit_quick(JOB_SECONDS="60")
    orphans = [login.submit_quick("--after", job["job"]) for job in (failing, cancelled)]
    after_any = login.submit_quick("--after", f"{failing['job']}:any")
    after_fail = login.submit_quick("--after", f"{failing['job']}:any", "--after", f"{cancelled['job']}:fail")
    login.wait(cancelled["job"], "RUNNING")
    await_true(lambda: bool(ran(cancelled)), 20)
    both = login.run(*login.quick("--after", cancelled["job"], "--sbatch", "dependency=singleton", "--dry-run"))
    assert f"--dependency=singleton,afterok:{cancelled['scheduler_id']}" in both.stdout
    assert login.run("cancel", cancelled["job"]).returncode == 0
    assert (Path(cancelled["run_dir"]) / "asked").read_text() == "0\n"  # it had time to save
    assert login.wait(failing["job"], "FAILED")["reason"].endswith("exit code 5")
    for orphan in orphans:
        assert login.wait(orphan["job"], "CANCELLED")["reason"] == "a job that it waited for did not end as required"
        assert not ran(orphan)
    for job in (after_any, after_fail):
        login.wait(job["job"], "COMPLETED")
    refused = login.run(*login.quick("--after", failing["job"]))
    assert refused.returncode == 1
    assert "FAILED" in refused.stderr


def test_a_chain(login: Login) -> None:
    """All are submitted at once, and may not requeue; those whose turn comes after the training is complete do not run."""
    trained = login.folder / "trained"
    trained.mkdir()
    keys = ("-o", f"Engine.save_load.output_dir={trained}")
    words = login.quick_trainer("--chain", "3", *keys, JOB_TRAINED=str(trained), JOB_EXIT="5")
    done = login.run(*words)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)["chain"]
    assert login.wait(first, "FAILED")["continues"] is None
    for job, before in ((second, first), (third, second)):
        facts = login.wait(job, "COMPLETED")
        assert (facts["reason"], facts["continues"]) == ("training was already complete", before)
        assert not ran(facts)
        script = (Path(facts["run_dir"]) / "job.sbatch").read_text()
        assert "#SBATCH --no-requeue" in script
        assert "#SBATCH --dependency=afterany:" in script
    assert "export GPTCTL_CONTINUES=1" in (Path(facts["run_dir"]) / "launch.sh").read_text()


def test_what_slurm_refuses_is_said_and_leaves_nothing(login: Login) -> None:
    for options, words in (
        (["--partition", "nowhere"], "invalid partition"),
        (["--nodes", "9"], "node count"),
        (["--partition", "small", "--nodes", "2"], "node"),
        (["--sbatch", "colour=red"], "unrecognized option"),
        (["--sbatch", "sockets-per-node=x"], "sockets-per-node"),
    ):
        refused = login.run(*login.quick(*options))
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert words in refused.stderr.lower()
        assert "Traceback" not in refused.stderr
        assert "hint: `sinfo`" in refused.stderr
    assert login.json("list") == []
    assert not any((login.folder / "runs").glob("*"))
    assert not any((login.folder / "runs").glob(".*"))


def test_validate_asks_slurm(login: Login) -> None:
    """Before anything is queued: its reason when it would refuse, and the start that it expects."""
    keys = [word for key in TINY for word in ("-o", key)]
    sound = login.run("validate", "--cluster", "lab", "--nodes", "2", *keys)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "would start at 20" in sound.stdout
    wrong = login.run("validate", "--cluster", "lab", "--nodes", "9", *keys, "-o", "Global.global_batch_size=36")
    assert wrong.returncode == 1
    assert "S008 Launch.cluster: Slurm rejects it: " in wrong.stdout
    login.lab.break_client("sbatch")
    elsewhere = login.run("validate", "--cluster", "lab", "--nodes", "2", *keys)
    assert elsewhere.returncode == 0
    assert (
        "notice: S008 Launch.cluster: cannot ask Slurm whether it accepts the job: sbatch is not installed here"
        in elsewhere.stdout
    )


def test_nobody_else_can_read_anything_of_a_job(login: Login) -> None:
    """Oracle: the modes of all files, after a job that failed and one that was cancelled."""
    failed = login.submit_quick("--nodes", "2", "--max-restarts", "1", JOB_EXIT="1")["job"]
    login.wait(failed, "FAILED")
    cancelled = login.submit_quick(JOB_SECONDS="100", JOB_EXIT="0")["job"]
    login.wait(cancelled, "RUNNING")
    for command in ("logs", "cancel"):
        assert login.run(command, cancelled).returncode == 0
    login.wait(cancelled, "CANCELLED")
    assert not_private(login.folder / "home", *(login.folder / "runs" / job for job in (failed, cancelled))) == []
