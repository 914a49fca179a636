"""What is brought home, and when. Oracle: what is on the hosts."""

from __future__ import annotations

import hashlib
import json
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

SLOW = 300_000_000  # bytes, which take a while to copy


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


def test_a_host_spoils_no_checkpoint_of_others(desk: Desk) -> None:
    words = desk.train("--nodes", "3", "--gpus-per-node", "1", "--json", keys=("Global.global_batch_size=6",))
    # The stand-in saves nothing: the test writes the checkpoints.
    submitted = desk.run(*("quick" if word == "hosts" else word for word in words))
    job = json.loads(submitted.stdout)["job"]
    desk.wait(job, "COMPLETED", "FAILED")
    plan = json.loads(desk.on("ssh1", f"cat {desk.run_root}/{job}/plan.json"))
    output, logs = plan["output_dir"], plan["log_dir"]
    good = {"bytes": 5, "sha256": hashlib.sha256(b"good\n").hexdigest()}
    names = ("rank_1.safetensors", "rank_2.safetensors", "other")
    manifest = json.dumps({"files": dict.fromkeys(names, good)})

    def save(host: str, step: int, **files: str) -> None:
        desk.on(host, f"mkdir -p {output}/step_{step}")
        for name, text in files.items():
            file = f"{output}/step_{step}/{name.replace('__', '.')}"
            desk.on(host, f"cat > {file} <<'END'\n{text}\nEND")

    save("ssh1", 5, manifest__json=manifest)
    save("ssh2", 5, rank_1__safetensors="good")
    save("private1", 5, rank_2__safetensors="good", other="good")
    fetched = ("fetch", job, "--checkpoints")
    here = desk.folder / "home" / "runs" / job
    assert desk.run(*fetched).returncode == 0
    copied = sorted((here / "output/step_5").iterdir())
    assert [file.name for file in copied] == ["manifest.json", "other", *names[:2]]

    # Not even if it is asked first: the name of the one tells its owner, the other has one already.
    save("ssh2", 5, rank_2__safetensors="evil", other="evil")
    assert desk.run(*fetched).returncode == 0
    assert [file.read_text() for file in copied[1:]] == ["good\n"] * 3

    # What it offers and then removes is left out, and nothing else.
    desk.on("ssh1", f"head -c {SLOW} /dev/zero > {logs}/attempt-0/big")
    desk.on("ssh2", f"echo > {logs}/attempt-0/gone; echo > {output}/step_5/gone")
    desk.on("private1", f"echo kept > {logs}/attempt-0/kept")
    process = desk.start(*fetched, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await_true(lambda: any((here / ".fetching").glob("*")), 30)
    desk.on("ssh2", f"rm {logs}/attempt-0/gone; rm -r {output}/step_5")
    said = "".join(process.communicate(timeout=60))
    assert process.returncode == 0, said
    assert f"not copied: ssh2:{logs}/attempt-0/gone, since it was removed there meanwhile" in said
    assert f"not copied: ssh2:{output}/step_5/gone" in said
    assert (here / "logs/attempt-0/kept").read_text() == "kept\n"
    assert [file.read_text() for file in copied[1:]] == ["good\n"] * 3
