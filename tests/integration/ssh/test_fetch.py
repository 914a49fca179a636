"""What is brought home, and when. Oracle: what is on the hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

from tests.integration.ssh.desk import Desk, await_true

SCRIPT = """
import os, socket, time
open("result.txt", "w").write(socket.gethostname())
open(b"b\\xffd", "w").write("odd")
os.makedirs(b"f\\xfflder")
open(b"f\\xfflder/b\\xffd", "w").write("odd")
os.symlink("/etc/passwd", "link")
for i in range(80):
    print("line", i, flush=True)
    time.sleep(0.05)
"""


def test_a_script_is_fetched_while_it_is_followed(desk: Desk) -> None:
    """Lines are shown once; what it leaves in its folder comes home from each host, whatever its name."""
    (desk.folder / "talk.py").write_text(SCRIPT)
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", "--follow", "--", "talk.py"]
    with desk.start(*asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as follower:
        await_true(lambda: desk.on("ssh2", f"cat {desk.run_root}/*/logs/attempt-0/workerlog.1").count("line") > 5, 60)
        for _ in range(2):
            assert desk.run("fetch").returncode == 0
        shown = follower.communicate(timeout=60)[0].splitlines()
    for rank in range(2):
        assert [line for line in shown if line.startswith(f"[rank {rank}] line")] == [
            f"[rank {rank}] line {number}" for number in range(80)
        ]
    home = desk.folder / "mine"
    done = desk.run("fetch", "--to", str(home))
    assert done.returncode == 0, done.stderr
    assert (home / "work" / "result.txt").read_text() == "ssh1"
    assert (home / "hosts" / "ssh2" / "work" / "result.txt").read_text() == "ssh2"
    assert os.path.exists(os.fsencode(home / "work") + b"/b\xffd")
    assert os.path.exists(os.fsencode(home / "work") + b"/f\xfflder/b\xffd")
    assert not (home / "work" / "link").exists()
    assert "since they are not regular files: link" in done.stderr
    assert not (home / "work" / "talk.py").exists()  # it came from here
    assert re.fullmatch(rf"(\d+) files, [\d,]+ bytes: {home}; \1 new\n", done.stdout), done.stdout
    assert desk.run("fetch", "--to", str(home)).stdout.endswith(f" bytes: {home}; nothing new\n")
    done = desk.run("fetch", "--to", "/proc/nowhere")
    assert done.returncode == 3
    assert "/proc/nowhere cannot be written" in done.stderr


def test_a_follower_that_is_stopped_holds_up_nobody(desk: Desk) -> None:
    job = desk.submit_quick(JOB_SECONDS="8")
    with desk.start("logs", "--follow", job["job"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as follower:
        time.sleep(2)
        desk.lab.signal(follower, signal.SIGSTOP)
        try:
            desk.wait(job["job"], "COMPLETED", seconds=30)
        finally:
            desk.lab.signal(follower, signal.SIGCONT)
        assert follower.wait(30) == 0


@pytest.mark.long
def test_cancelled_gently_the_trainer_saves_on_every_host(desk: Desk) -> None:
    keys = ("Engine.max_steps=100000", "Engine.logging_freq=1")
    job = desk.json(*desk.train("--nodes", "2", "--gpus-per-node", "1", keys=keys))["job"]
    await_true(lambda: "global step" in desk.on("ssh1", f"cat {desk.run_root}/*/logs/attempt-0/workerlog.0"), 60)
    done = desk.run("cancel", job)
    assert done.returncode == 0, done.stderr
    assert "CANCELLED" in done.stdout
    for host in ("ssh1", "ssh2"):
        assert "step_" in desk.on(host, f"ls {desk.run_root}/*/output"), host
        assert desk.left(host) == []
