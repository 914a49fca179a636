"""Jobs on real ssh hosts that share nothing. Oracles: the same training in one process, and what is on the hosts."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from tests.integration.slurm.login import TINY, losses
from tests.integration.ssh.desk import HOSTS, Desk
from tests.ranks import run as run_ranks

KEYS = ("Engine.max_steps=10", "Global.global_batch_size=12")


def test_three_hosts_train_as_one_process_would(desk: Desk, tmp_path: Path) -> None:
    """One of them behind a bastion; ranks follow the order of the profile; every byte can be brought home."""
    done = desk.run(*desk.train("--nodes", "3", "--gpus-per-node", "1", "--follow", keys=KEYS))
    assert done.returncode == 0, done.stdout + done.stderr
    facts = desk.json("status")
    assert (facts["state"], facts["world_size"], facts["hosts"]) == (
        "COMPLETED",
        3,
        ["10.78.0.51", "10.78.0.52", "10.78.0.1"],
    )
    for rank, host in enumerate(HOSTS):
        assert f"[rank {rank}]" in done.stdout
        assert f"workerlog.{rank}" in desk.on(host, f"ls {desk.run_root}/*/logs/attempt-0")
        assert desk.left(host) == []
    alone = run_ranks(tmp_path, *TINY, *KEYS)
    assert alone.ok, alone.text
    here = list(losses(facts).values())
    assert len(here) == 10
    # What the first rank recorded came with its logs: see `gptctl diff`.
    recorded = json.loads(Path(facts["run_dir"], "attempt-0", "environment.json").read_text())
    assert (recorded["job"], recorded["attempt"]) == (facts["job"], 0)
    assert max(abs(a - b) for a, b in zip(here, alone.metrics())) <= 5e-6
    assert_every_byte_comes_home(desk, facts["job"])


@pytest.mark.long
def test_a_job_goes_on_from_what_each_host_has(desk: Desk) -> None:
    asked = ("--nodes", "2", "--gpus-per-node", "1", "--follow")
    done = desk.run(*desk.train(*asked, keys=("Engine.max_steps=2",)))
    assert done.returncode == 0, done.stdout + done.stderr
    done = desk.run(*desk.train(*asked, "--resume", desk.json("status")["job"], keys=("Engine.max_steps=4",)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(desk.json("status"))) == [3, 4]


@pytest.mark.long
def test_a_job_is_resumed(desk: Desk) -> None:
    """`gptctl resume`, from what each host has. Oracle: the losses of one job that trains all steps, in one process."""
    done = desk.run(*desk.train("--nodes", "2", "--gpus-per-node", "1", "--follow", keys=("Engine.max_steps=2",)))
    assert done.returncode == 0, done.stdout + done.stderr
    first = desk.json("status")["job"]
    done = desk.run("resume", first, "-o", "Engine.max_steps=4", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"continues {first} from step 2" in done.stderr
    second = desk.json("status")
    assert (second["continues"], list(losses(second))) == (first, [3, 4])
    assert desk.json("show", second["job"])["lineage"] == [first, second["job"]]
    rows = desk.json("logs", second["job"], "--metrics")
    assert [(row["job"], row["step"]) for row in rows] == [
        (first, 1),
        (first, 2),
        (second["job"], 3),
        (second["job"], 4),
    ]
    # From here nobody sees which checkpoints of the hosts are verified: both stay.
    old = desk.json("rm", "--older", "0s", "--dry-run")
    why = "has the newest checkpoint of the run of {}: step_{} on its hosts, which may not be verified"
    stays = [
        {"job": job, "state": "COMPLETED", "why": why.format(second["job"], step)}
        for job, step in ((first, 2), (second["job"], 4))
    ]
    assert (old["remove"], old["stay"]) == ([], stays)
    # The folders of the first job are removed on the hosts, too; the second one does not need them any more.
    assert desk.run("rm", "--yes", first).returncode == 0
    done = desk.run("resume", second["job"], "-o", "Engine.max_steps=5", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(desk.json("status"))) == [5]


def assert_every_byte_comes_home(desk: Desk, job: str) -> None:
    """Also when it was interrupted, and no byte that is wrong: the oracle is sha256sum on the hosts."""
    home = desk.folder / "mine"
    fetched = desk.json("fetch", job, "--to", str(home))
    there = {}
    for host in reversed(HOSTS):  # of what several have, the first one's is brought
        sums = desk.on(host, f"cd {desk.run_root}/* && find logs output -type f ! -name .lock -exec sha256sum {{}} +")
        there |= {line.split(maxsplit=1)[1]: line.split()[0] for line in sums.splitlines()}
    here = {str(file.relative_to(home)): file for file in home.rglob("*") if file.is_file()}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in here.items()} == there
    assert (fetched["files"], fetched["new_files"]) == (len(there), len(there))
    again = desk.json("fetch", job, "--to", str(home))
    assert again == {**fetched, "new_files": 0, "new_bytes": 0}
    shard = next(home.glob("output/step_*/*.safetensors"))
    content = shard.read_bytes()
    desk.on("head", f"head -c 100 {shard} > {shard}.part; rm {shard}")
    again = desk.json("fetch", job, "--to", str(home))
    assert (again["new_files"], again["new_bytes"]) == (1, len(content))
    assert shard.read_bytes() == content
    desk.on(
        "head", f"touch -r {shard} {home}/time; printf x | dd of={shard} conv=notrunc; touch -r {home}/time {shard}"
    )
    done = desk.run("fetch", job, "--to", str(home))
    assert done.returncode == 1
    assert f"{shard.parent}: {shard.name} is damaged" in done.stderr


@pytest.mark.long
def test_hosts_that_share_a_folder(desk: Desk) -> None:
    """Then a layout may reach over hosts; without such a folder `validate` says why it may not, and what does."""
    keys = ("Engine.max_steps=2", "Distributed.mp_degree=2")
    asked = ["--nodes", "2", "--gpus-per-node", "1"]
    done = desk.run(*desk.train(*asked, keys=keys))
    assert done.returncode == 1
    assert "A015" in done.stderr
    assert "shared_fs: true" in done.stderr
    desk.write_profile("hosts", shared_fs=True, run_root=f"{desk.lab.folder}/tmp/{desk.folder.name}")
    done = desk.run(*desk.train(*asked, "--follow", keys=keys))
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = desk.json("fetch", "--to", str(desk.folder / "mine"))
    assert fetched["files"] == len([file for file in (desk.folder / "mine").rglob("*") if file.is_file()])
    assert (desk.folder / "mine" / "output" / "step_2" / "manifest.json").exists()
    assert [desk.left(host) for host in HOSTS] == [[], [], []]


@pytest.mark.long
def test_a_folder_that_is_not_shared_though_the_profile_says_so(desk: Desk) -> None:
    desk.write_profile("quick", shared_fs=True, python=str(desk.stand_in))
    done = desk.run(*desk.quick())
    assert done.returncode == 3
    assert "S010 ssh2: " in done.stderr
    assert "is not visible here, although the profile has shared_fs: true" in done.stderr
    assert [desk.on(host, f"ls {desk.run_root} 2> /dev/null") for host in HOSTS] == ["", "", ""]


def test_files_are_the_users_alone(desk: Desk) -> None:
    job = desk.submit_quick()
    desk.wait(job["job"], "COMPLETED")
    for host in HOSTS:
        open_ones = desk.on(host, f"find {desk.run_root} -perm /077")
        assert open_ones == "", host
    # Whoever reads logs and cancels a job writes, too.
    other = desk.submit_quick(JOB_SECONDS="100")["job"]
    for command in ("logs", "cancel"):
        assert desk.run(command, other).returncode == 0
    assert desk.on("head", f"find {desk.folder}/home ! -type l -perm /077") == ""
    assert stat.S_IMODE(Path(job["run_dir"]).stat().st_mode) == 0o700
    assert json.loads((Path(job["run_dir"]) / "plan.json").read_text())["kind"] == "ssh"
