"""`submit --queue` on ssh hosts: each has a queue of its own. Oracles: when the jobs' processes ran there, and what is
left."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.integration.ssh.desk import HOSTS, Desk, await_true


def test_jobs_wait_for_their_hosts(desk: Desk) -> None:
    """Two jobs that name the same hosts in opposite order wait for a third, then run one after the other."""
    profile = yaml.safe_load((desk.folder / "clusters/quick.yaml").read_text())
    backwards = {**profile, "name": "backwards", "hosts": profile["hosts"][::-1]}
    (desk.folder / "clusters/backwards.yaml").write_text(json.dumps(backwards))
    first = desk.submit_quick(JOB_SECONDS="100")
    second = desk.submit_quick("--queue")
    assert desk.json("status", second["job"])["state"] == "PENDING"
    third = desk.submit_quick("--queue", "--cluster", "backwards")
    cancelled = desk.submit_quick("--queue")
    waiting = desk.json("status", second["job"])
    assert waiting["state"] == "PENDING"
    assert waiting["reason"].startswith(f"waits for {first['job']}"), waiting
    assert desk.run("cancel", cancelled["job"]).returncode == 0
    assert desk.json("status", cancelled["job"])["state"] == "CANCELLED"
    assert [desk.ran(host)[1:] for host in HOSTS] == [[]] * 3
    assert desk.run("cancel", "--now", first["job"]).returncode == 0
    for job in (second, third):
        assert desk.wait(job["job"], "COMPLETED", "FAILED")["state"] == "COMPLETED"
    for host in HOSTS:
        assert len(desk.ran(host)) == 3
        await_true(lambda host=host: desk.left(host) == [], 10)
        assert desk.on(host, "ls ~/.local/state/gptctl/queue/*/*.ticket 2> /dev/null") == ""


@pytest.mark.long
def test_jobs_after_another(desk: Desk) -> None:
    """The agent of the first host watches the other job there, while nobody is connected."""
    one = ("--nodes", "1")
    first = desk.submit_quick(*one, JOB_SECONDS="100")
    jobs = {when: desk.submit_quick(*one, "--after", f"{first['job']}{when}") for when in ("", ":any", ":fail")}
    assert desk.json("status", jobs[""]["job"])["reason"] == f"waits for {first['job']} to complete"
    desk.write_profile("elsewhere", hosts=[{"host": "ssh2"}])
    refused = desk.run("submit", "--cluster", "elsewhere", "--after", first["job"], "--", "job.py")
    assert refused.returncode == 2
    assert f"--after {first['job']}: it runs on quick; a job on elsewhere cannot wait for it" in refused.stderr
    assert desk.run("cancel", "--now", first["job"]).returncode == 0
    for when, state in (("", "CANCELLED"), (":any", "COMPLETED"), (":fail", "COMPLETED")):
        facts = desk.wait(jobs[when]["job"], "CANCELLED", "COMPLETED", "FAILED")
        assert facts["state"] == state, facts
    assert len(desk.ran("ssh1")) == 3


@pytest.mark.long
def test_a_chain(desk: Desk) -> None:
    """The second job resumes, on every host, what the first one left there, and finishes the training."""
    keys = ("Engine.max_steps=4000", "Engine.save_load.save_steps=100000", "Global.global_batch_size=4")
    done = desk.run(*desk.train("--json", "--chain", "3", "--nodes", "2", "--gpus-per-node", "1", keys=keys))
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)["chain"]
    log = f"{desk.run_root}/{first}/logs/attempt-0/workerlog.0"
    await_true(lambda: "global step 20," in desk.on("ssh1", f"grep -m 20 'global step' {log}"), 120)
    desk.on("ssh1", f"kill -TERM $(sed 's/.*\"pid\": \\([0-9]*\\).*/\\1/' {desk.run_root}/{first}/claim.json)")
    assert desk.wait(first, "STOPPED", "FAILED", "COMPLETED")["state"] == "STOPPED"
    assert desk.wait(second, "COMPLETED", "FAILED", seconds=400)["state"] == "COMPLETED"
    assert desk.wait(third, "COMPLETED", "FAILED")["reason"] == "training was already complete"
    text = desk.on("ssh1", f"cat {desk.run_root}/{second}/logs/attempt-0/workerlog.0")
    found = re.search(r"global step (\d+),", text)
    assert found
    assert int(found[1]) > 20
