"""`gptctl logs` on real jobs. The oracle is the files that the ranks wrote."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

GPTCTL = str(Path(sys.executable).with_name("gptctl"))
# Prints lines of every length, some of them slowly and in pieces, and never ends its last one.
CHATTER = """
import os, random, sys, time
rank = int(os.environ["RANK"])
source = random.Random(rank)
for number in range(100000):
    line = f"{os.environ['GPTCTL_ATTEMPT']} {rank} {number} " + "é中🏖x"[number % 4] * source.choice([0, 1, 50, 3000])
    data = line.encode()
    half = source.randrange(len(data))
    os.write(source.choice([1, 2]), data[:half])
    if number % 16 == 0:
        time.sleep(0.01)
    os.write(1, data[half:] + b"\\n")
    time.sleep(0.002)
"""


def follow(jobs, *arguments: str, out: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    with open(out, "wb") as stream:
        return subprocess.Popen([GPTCTL, "logs", "--follow", *arguments], cwd=jobs.folder, env=env, stdout=stream)


def lines_of(data: bytes) -> Counter[bytes]:
    return Counter(line for line in data.split(b"\n") if line)


def test_raw_following_loses_and_doubles_nothing_over_three_attempts(jobs) -> None:
    """The union of what was followed equals the files, with a rank killed in the middle of its words in each attempt."""
    (jobs.folder / "chatter.py").write_text(CHATTER)
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "2", "--max-restarts", "2", "--", "chatter.py")
    out = jobs.folder / "followed"
    followers = [
        follow(jobs, job, "--raw", out=out),
        follow(jobs, job, "--raw", "--rank", "3", out=jobs.folder / "one"),
    ]
    for attempt in range(3):
        jobs.await_text(job, 2, f"{attempt} 2 200 ", attempt=attempt)
        os.kill(jobs.pid(job, 2, attempt), signal.SIGKILL)
    assert [follower.wait(60) for follower in followers] == [1, 1]
    assert jobs.status(job)["state"] == "FAILED"
    logs = jobs.run_dir(job) / "logs"
    files = [file for file in sorted(logs.rglob("*")) if file.is_file()]
    assert len(files) == 3 * (4 + 2)
    assert lines_of(out.read_bytes()) == sum((lines_of(file.read_bytes()) for file in files), Counter())
    of_rank_3 = [logs / f"attempt-{attempt}" / "workerlog.3" for attempt in range(3)]
    assert lines_of((jobs.folder / "one").read_bytes()) == sum(
        (lines_of(file.read_bytes()) for file in of_rank_3), Counter()
    )
    once = subprocess.run(
        [GPTCTL, "logs", job, "--raw", "--rank", "1", "--attempt", "1"],
        env={**os.environ, "HOME": str(jobs.folder / "home")},
        capture_output=True,
    ).stdout
    assert once == (logs / "attempt-1" / "workerlog.1").read_bytes()
    failed = jobs.gptctl("logs", job, "--failed").stdout
    assert failed.splitlines()[:2] == [
        f"{job}: FAILED: rank 2 (node 1): killed by signal 9 (SIGKILL); possibly out of memory",
        "attempt 2: rank 2 failed first: SIGKILL",
    ]
    assert "attempt 0: rank 2 failed first: SIGKILL" in jobs.gptctl("logs", job, "--failed", "--attempt", "0").stdout


def test_the_commands_of_the_first_page_typed_literally(jobs) -> None:
    jobs.gptctl("init")
    small = "  max_steps: 4\n  logging_freq: 1\n  test_iters: 1"
    config = jobs.folder / "config.yaml"
    config.write_text(config.read_text().replace("  max_steps: 500", small).replace("  logging_freq: 25\n", ""))
    assert jobs.gptctl("validate", "config").returncode == 0
    submitted = jobs.gptctl("submit", "--nodes", "2")
    assert submitted.returncode == 0, submitted.stderr
    job = (jobs.folder / "runs" / "latest").resolve().name
    for word in (
        job,
        "4 ranks",
        "127.0.0.1:",
        "static rendezvous",
        str(jobs.run_dir(job) / "logs"),
        f"gptctl logs {job} --follow",
    ):
        assert word in submitted.stdout
    followed = jobs.gptctl("logs", "--follow")
    assert followed.returncode == 0
    assert followed.stderr.splitlines() == [f"job {job}", f"{job}: COMPLETED"]
    for rank in range(4):
        text = jobs.log(job, rank)
        assert f"rank {rank}: mp 1" in text
        assert all(f"[rank {rank}] {line}" in followed.stdout for line in text.splitlines())
    assert jobs.gptctl("logs", "--metrics").stdout.splitlines()[0] == "4 steps"
    rows = json.loads(jobs.gptctl("logs", "--metrics", "--json").stdout)
    assert [row["step"] for row in (rows["steps"] if isinstance(rows, dict) else rows)] == [1, 2, 3, 4]


def test_ctrl_c_leaves_the_job_running(jobs) -> None:
    (jobs.folder / "x.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(600)")
    job = jobs.submit("--", "x.py")
    out = jobs.folder / "out"
    follower = follow(jobs, job, out=out)
    deadline = time.monotonic() + 30
    while b"on" not in out.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(10) == 130
    assert jobs.status(job)["state"] == "RUNNING"


def test_a_terminal_gets_colours_and_progress_and_no_foreign_control_sequences(jobs) -> None:
    (jobs.folder / "x.py").write_text(
        "print('\\x1b]0;title\\x07\\x1b[31mred\\x1b[0m')\n"
        "print('global step 5, epoch: 0, batch: 4, loss: 3.5, avg_reader_cost: 0.1 sec, avg_batch_cost: 0.2 sec, "
        "speed: 4.00 step/s, ips_total: 10 tokens/s, ips: 5 tokens/s, learning rate: 1e-3', flush=True)\n"
        "import time; time.sleep(2)"
    )
    job = jobs.submit("--", "x.py")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(jobs.folder)
        os.execve(
            GPTCTL,
            [GPTCTL, "logs", job, "--follow"],
            {**os.environ, "HOME": str(jobs.folder / "home"), "TERM": "xterm"},
        )
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"title" not in shown
    assert b"\x1b[36m[rank 0] \x1b[0m" in shown
    assert b"red\r\n" in shown
    assert b"step 5/" in shown
    assert b"\x1b[31m" not in shown
    lines = re.sub(rb"\r\x1b\[K", b"", shown)
    assert b"COMPLETED" in lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rank", "x"], "separate ranks and ranges"),
        (["--rank", "5-3"], "separate ranks and ranges"),
        (["--grep", "("], "--grep"),
        (["--since", "yesterday"], "--since"),
        (["--failed", "--follow"], "--failed and --follow cannot be combined"),
        (["--raw", "--json"], "cannot be combined"),
        (["--attempt", "0", "--all-attempts"], "cannot be combined"),
        (["--attempt", "7"], "no log file matches"),
        (["--rank", "99"], "no log file matches"),
    ],
)
def test_wrong_questions(jobs, arguments: list[str], expected: str) -> None:
    job = jobs.quick()
    jobs.wait(job)
    answer = jobs.gptctl("logs", job, *arguments)
    assert answer.returncode in (1, 2)
    assert expected in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_seeds_own_logs_make_tables(gptctl, tmp_path) -> None:
    """Lines as FleetX published them, their colour codes without the escape byte."""
    line = "[32m[2022-07-27 13:17:17,469] [    INFO] [0m - global step {0}, epoch: 0, batch: {1}, loss: 11.266701698, avg_reader_cost: 0.24114 sec, avg_batch_cost: 3.90742 sec, speed: 0.26 step/s, ips_total: 16772 tokens/s, ips: 16772 tokens/s, learning rate: 5.55556e-09 [0m"
    (tmp_path / "dp8.log").write_text("\n".join(line.format(step, step - 1) for step in range(1, 11)))
    table = gptctl("logs", "dp8.log", "--metrics").stdout.splitlines()
    assert table[0] == "10 steps"
    assert table[2].split() == ["1", "11.266701698", "16772", "16772", "0.26", "5.55556e-09"]
    assert len(table) == 12
