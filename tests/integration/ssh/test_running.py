"""What may happen to hosts and connections while a job runs. Oracles: what was done to them, and what runs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.integration.ssh.desk import HOSTS, Desk, await_true


def test_logs_cannot_be_written_on_one_host(desk: Desk) -> None:
    for host in ("ssh1", "private1"):
        desk.lab.run(host, "install", "-d", "-o", "gpt", "/home/logs", check=True)
    desk.lab.run("ssh2", "install", "-d", "-m", "755", "/home/logs", check=True)
    job = desk.submit_quick("-o", "Launch.log_dir=/home/logs")
    facts = desk.wait(job["job"], "FAILED")
    assert f"node 1 (10.78.0.52): /home/logs/{job['job']}: Permission denied" in facts["reason"], facts


def test_the_folder_of_a_job_is_deleted_on_its_host(desk: Desk) -> None:
    """`cancel` finds its processes all the same."""

    asked = ["submit", "--cluster", "quick", "--nodes", "1", "--gpus-per-node", "1", "--env", "JOB_SECONDS=100"]
    job = json.loads(desk.run(*asked, "--json", "--", "job.py").stdout)
    await_true(lambda: bool(desk.ran("ssh1")), 20)
    desk.on("ssh1", f"rm -rf {desk.run_root}/*")
    assert desk.run("cancel", job["job"]).returncode == 0
    assert desk.left("ssh1") == []


def test_a_host_that_cannot_look_is_not_taken_for_one_without_the_job(desk: Desk) -> None:
    job = desk.submit_quick(JOB_SECONDS="30")
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    hidden = desk.stand_in.with_suffix(".off")
    desk.stand_in.rename(hidden)
    facts = desk.json("status", job["job"])
    assert facts["state"] == "UNKNOWN", facts
    assert "its agent script failed: " in facts["reason"]
    hidden.rename(desk.stand_in)
    assert desk.json("status", job["job"])["state"] == "RUNNING"
    assert desk.run("cancel", "--now", job["job"]).returncode == 0


def test_a_host_is_out_of_reach_when_the_job_ends(desk: Desk) -> None:
    """What is missing is said, and comes when the host is back."""
    script = "import time\nfor i in range(60):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"
    (desk.folder / "talk.py").write_text(script)
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", "--follow", "--", "talk.py"]
    with (desk.folder / "shown").open("w") as out, (desk.folder / "said").open("w") as err:
        follower = desk.start(*asked, stdout=out, stderr=err)
    await_true(lambda: (desk.folder / "shown").read_text().count("line") > 10, 60, (desk.folder / "said").read_text)
    desk.lab.run("ssh2", "pkill", "-KILL", "-x", "sshd")
    assert follower.wait(60) == 0
    assert "ssh2 has been unreachable since" in (desk.folder / "said").read_text()
    assert "its logs here are incomplete" in (desk.folder / "said").read_text()
    desk.lab.restart_sshd("ssh2")
    shown = desk.run("logs", "--rank", "1").stdout.splitlines()
    assert [line for line in shown if "line" in line] == [f"[rank 1] line {number}" for number in range(60)]
    kinds = desk.on("head", f"find {desk.folder}/home ! -type l -perm /077")
    assert kinds == ""


def test_failed_attempts_begin_again_on_all_hosts(desk: Desk) -> None:
    job = desk.submit_quick("--max-restarts", "1", JOB_EXIT="7")
    assert "exit code 7" in desk.wait(job["job"], "FAILED")["reason"]
    for host in HOSTS:
        ports = [re.search(r"--master-port=(\d+)", line)[1] for line in desk.ran(host)]  # type: ignore[index]
        assert len(set(ports)) == 2
        assert [line[:2] for line in desk.ran(host)] == ["0 ", "1 "]


def test_a_host_is_out_of_reach_while_the_job_runs(desk: Desk) -> None:
    """It is shown as such, never as finished; `cancel` says where it could not end the job, and later does."""
    desk.write_profile("quick", python=str(desk.stand_in), start_timeout=2)
    job = desk.submit_quick(JOB_SECONDS="100")
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    desk.lab.cut("ssh2")
    facts = desk.json("status", job["job"])
    assert facts["state"] == "RUNNING"
    assert re.search(r"ssh2 has been unreachable since 20\d\d-\S+ \S+: ", facts["reason"]), facts["reason"]
    done = desk.run("cancel", "--now", job["job"], timeout=100)
    assert done.returncode == 3
    assert "ssh2" in done.stderr
    # The first host has recorded the result, although it waited for one that did not answer.
    assert desk.json("status", job["job"])["state"] == "CANCELLED"
    desk.lab.restore("ssh2")
    assert desk.run("cancel", "--now", job["job"]).returncode == 0
    assert desk.json("status", job["job"])["state"] == "CANCELLED"
    assert [desk.left(host) for host in HOSTS] == [[], [], []]


@pytest.mark.long
def test_a_cancel_that_reaches_the_first_host_later(desk: Desk) -> None:
    """The other hosts stop at once, so that the first one takes them for lost: it is cancelled all the same."""
    desk.write_profile("quick", python=str(desk.stand_in), start_timeout=2)
    job = desk.submit_quick(JOB_SECONDS="300")["job"]
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    desk.lab.cut("ssh1")
    assert desk.run("cancel", "--now", job, timeout=100).returncode == 3
    desk.lab.restore("ssh1")
    await_true(lambda: not desk.left("ssh1"), 60)  # it has noticed that it lost the others
    assert desk.run("cancel", job).returncode == 0
    assert desk.json("status", job)["state"] == "CANCELLED"


def test_the_first_host_is_rebooted(desk: Desk) -> None:
    desk.write_profile("quick", python=str(desk.stand_in), start_timeout=2)
    job = desk.submit_quick(JOB_SECONDS="100")
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    desk.lab.crash("ssh1")
    said = desk.json("status", job["job"])
    assert said["state"] == "UNKNOWN"
    assert "ssh1 has been unreachable since" in said["reason"]
    desk.lab.restart("ssh1")
    await_true(lambda: not any(desk.left(host) for host in HOSTS), 30)  # the others notice that nobody leads them
    desk.wait(job["job"], "LOST")  # its sshd may need a moment
    assert desk.run("cancel", job["job"]).returncode == 0


@pytest.mark.long
def test_another_host_is_rebooted(desk: Desk) -> None:
    """The first one gives it up in the end, ends the job everywhere, and says why."""
    job = desk.submit_quick(JOB_SECONDS="300")
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    desk.lab.crash("ssh2")
    facts = desk.wait(job["job"], "FAILED", seconds=150)
    assert "its host is lost" in facts["reason"], facts
    assert [desk.left(host) for host in ("ssh1", "private1")] == [[], []]


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.long)])
def test_connections_break_while_a_job_is_followed(desk: Desk, seconds: int) -> None:
    """sshd restarted, a cable pulled, the jump host gone for a while: nothing is lost, and the job does not notice."""
    count = 10 * seconds + 60
    script = f"import time\nfor i in range({count}):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"
    (desk.folder / "talk.py").write_text(script)
    asked = ["submit", "--cluster", "hosts", "--nodes", "3", "--gpus-per-node", "1", "--follow", "--", "talk.py"]
    with (desk.folder / "shown").open("w") as out, (desk.folder / "said").open("w") as err:
        first = desk.start(*asked, stdout=out, stderr=err)
    await_true(lambda: (desk.folder / "shown").read_text().count("line") > 10, 60, (desk.folder / "said").read_text)
    with (desk.folder / "shown2").open("w") as out:
        second = desk.start("logs", "--follow", stdout=out)
    desk.lab.restart_sshd("ssh1")
    for host in ("ssh2", "bastion"):
        desk.lab.cut(host)
    time.sleep(seconds / 2)
    desk.lab.restore("bastion")
    desk.lab.restart_sshd("bastion")
    time.sleep(seconds / 2)
    desk.lab.restore("ssh2")
    assert first.wait(120) == 0
    assert second.wait(60) == 0
    for name in ("shown", "shown2"):
        lines = (desk.folder / name).read_text().splitlines()
        for rank in range(3):
            mine = [line for line in lines if line.startswith(f"[rank {rank}] line ")]
            assert mine == [f"[rank {rank}] line {number}" for number in range(count)], (name, rank)


def test_without_progress_three_attempts_are_enough(desk: Desk) -> None:
    """The stand-in is taken for the bundled trainer, fails at once and saves nothing."""
    asked = desk.train("--nodes", "1", "--max-restarts", "9", "--env", "JOB_EXIT=7", "--json")
    asked[asked.index("hosts")] = "quick"
    job = json.loads(desk.run(*asked).stdout)
    facts = desk.wait(job["job"], "FAILED")
    assert facts["attempts"] == 3
    assert facts["reason"].endswith("; three attempts without a new checkpoint")


@pytest.mark.long
def test_the_copy_of_metrics_follows_a_restart(desk: Desk) -> None:
    """On resume the trainer takes the steps since its checkpoint out of its records. Oracle: the file on the host."""
    keys = ("Engine.max_steps=3000", "Engine.logging_freq=1", "Engine.save_load.save_steps=400")
    asked = desk.train("--nodes", "1", "--gpus-per-node", "1", "--max-restarts", "1", keys=keys)
    job = json.loads(desk.run(*asked, "--json").stdout)["job"]
    step = 0

    def has_begun_the_next_part() -> bool:
        nonlocal step
        step = (desk.json("status", job)["progress"] or {}).get("step", 0)
        return step > 400 and step % 400 > 100

    await_true(has_begun_the_next_part, 60)
    facts = desk.json("status", job)
    copy, names = Path(facts["run_dir"], "output", "metrics.jsonl"), f"{desk.run_root}/{job}/output/metrics"
    before = copy.read_bytes()
    desk.on("ssh1", "pkill -9 -f 'python -u .*[r]ank_log'")
    # Nobody looks until the new file is longer than the copy: its size alone shows nothing.
    await_true(lambda: bool(desk.on("ssh1", f"ls {desk.run_root}/{job}/result.json 2> /dev/null")), 120)
    desk.wait(job, "COMPLETED")
    rows = desk.json("logs", job, "--metrics")
    assert [row["step"] for row in rows] == list(range(1, 3001))
    assert desk.on("ssh1", f"cat {names}.repeated.jsonl").count("\n") > 50
    text = desk.on("ssh1", f"cat {names}.jsonl")
    assert copy.read_text() == text
    assert not text.encode().startswith(before)
    assert list(copy.parent.glob("*.again")) == []
