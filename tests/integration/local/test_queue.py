"""`submit --queue` on this machine. Oracles: the times that the jobs' own processes write, and the queue's folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Notes when it starts and ends; runs until the file `go` exists, if it is told to.
TIMED = """#!/bin/sh
echo "$GPTCTL_JOB start $(date +%s.%N)" >> "$OUT/times"
while [ -n "$HOLD" ] && [ ! -e "$OUT/go" ]; do sleep 0.05; done
sleep 0.05
echo "$GPTCTL_JOB end $(date +%s.%N)" >> "$OUT/times"
exit "${CODE:-0}"
"""


@pytest.fixture
def timed(jobs):
    (jobs.folder / "quick").write_text(TIMED)
    return jobs


def times(folder: Path) -> list[tuple[str, str, float]]:
    lines = (folder / "times").read_text().split("\n")[:-1]
    return [(job, what, float(when)) for job, what, when in (line.split() for line in lines)]


def await_state(jobs, job: str, state: str, reason: str = "", seconds: float = 30) -> dict:
    deadline = time.monotonic() + seconds
    while True:
        facts = jobs.status(job)
        if facts["state"] == state and reason in facts["reason"]:
            return facts
        assert time.monotonic() < deadline, facts
        time.sleep(0.1)


def test_twenty_at_once_run_one_by_one(timed) -> None:
    """In the order in which they came, which is that of their tickets, after a job that did not queue."""
    first = timed.quick("--env", f"OUT={timed.folder}", "--env", "HOLD=1")
    gptctl = str(Path(sys.executable).with_name("gptctl"))
    command = [gptctl, "submit", "--json", "--queue", "--cluster", "./quick.yaml", "--env", f"OUT={timed.folder}"]
    env = {**os.environ, "HOME": str(timed.folder / "home")}
    submits = [
        subprocess.Popen([*command, "--", "x.py"], cwd=timed.folder, env=env, stdout=subprocess.PIPE) for _ in range(20)
    ]
    ids = {json.loads(submit.communicate(timeout=120)[0])["job"] for submit in submits}
    assert len(ids) == 20
    queue = timed.folder / "home/.local/state/gptctl/queue"
    tickets = [json.loads(file.read_text()) for file in sorted(queue.glob("*/*.ticket"))]
    (timed.folder / "go").touch()
    deadline = time.monotonic() + 120
    while len(times(timed.folder)) < 42 and time.monotonic() < deadline:
        time.sleep(0.1)
    ran = times(timed.folder)
    assert [what for _, what, _ in ran] == ["start", "end"] * 21
    assert [when for _, _, when in ran] == sorted(when for _, _, when in ran)
    order = [job for job, what, _ in ran if what == "start"]
    assert order == [ticket["job"] for ticket in tickets]
    assert order[0] == first
    assert set(order[1:]) == ids


def test_a_place_is_freed_by_kill_and_by_cancel(timed) -> None:
    """The jobs behind move up; a job that was started without --queue counts, too."""
    out = {"OUT": str(timed.folder)}
    hold = ["--env", f"OUT={timed.folder}", "--env", "HOLD=1"]
    first = timed.quick(*hold)
    waiting = [timed.quick("--queue", "--env", f"OUT={timed.folder}") for _ in range(4)]
    facts = await_state(timed, waiting[3], "PENDING")
    assert facts["reason"] == f"waits for {first} and 3 others (4 of 4 in the queue)"
    assert facts["attempts"] == 0
    os.kill(json.loads((timed.run_dir(waiting[0]) / "claim.json").read_text())["pid"], signal.SIGKILL)
    assert timed.gptctl("cancel", waiting[1], **out).stdout.strip() == f"{waiting[1]}: CANCELLED"
    assert timed.status(waiting[0])["state"] == "LOST"
    assert "while it was waiting to start" in timed.status(waiting[0])["reason"]
    await_state(timed, waiting[2], "PENDING", f"waits for {first} (1 of 2 in the queue)")
    # `wait` says what the job waits for.
    told = timed.gptctl("wait", waiting[3], "--timeout", "0")
    assert f"{waiting[3]}: PENDING: waits for {first} and {waiting[2]} (2 of 2 in the queue)" in told.stderr
    (timed.folder / "go").touch()
    assert [timed.wait(job) for job in (first, *waiting[2:])] == ["COMPLETED"] * 3
    assert [job for job, what, _ in times(timed.folder) if what == "start"] == [first, *waiting[2:]]
    queue = timed.folder / "home/.local/state/gptctl/queue"
    assert list(queue.glob("*/*.ticket")) == []
    assert queue.stat().st_mode & 0o077 == 0


def test_ranks_without_a_supervisor_keep_their_place(timed) -> None:
    """Oracle: the second job starts when the processes of the first have ended, not when its supervisor is killed."""
    out = ["--env", f"OUT={timed.folder}"]
    first = timed.quick(*out, "--env", "HOLD=1")
    deadline = time.monotonic() + 30
    while not (timed.folder / "times").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(json.loads((timed.run_dir(first) / "claim.json").read_text())["pid"], signal.SIGKILL)
    second = timed.quick("--queue", *out)
    await_state(timed, second, "PENDING", f"waits for {first}")
    (timed.folder / "go").touch()
    assert timed.wait(second) == "COMPLETED"
    assert [what for _, what, _ in times(timed.folder)] == ["start", "end", "start", "end"]


def test_jobs_after_another(timed) -> None:
    """Each starts when the other has ended as it asked for; one that never can is CANCELLED, and says why."""
    out = ["--env", f"OUT={timed.folder}"]
    first = timed.quick(*out, "--env", "HOLD=1", "--env", "CODE=5")
    then = {when: timed.quick("--after", f"{first}{when}", *out) for when in ("", ":any", ":fail")}
    last = timed.quick("--after", f"{then[':any']}", "--after", f"{then[':fail']}:ok", "--queue", *out)
    never = timed.quick("--after", then[""], *out)
    assert timed.status(then[""])["reason"] == f"waits for {first} to complete"
    assert timed.status(then[":fail"])["reason"] == f"waits for {first} to fail"
    assert timed.status(last)["reason"] == f"waits for {then[':any']} to complete"
    (timed.folder / "go").touch()
    assert [timed.wait(job) for job in (first, then[":any"], then[":fail"], last)] == ["FAILED"] + ["COMPLETED"] * 3
    for job, before, state in ((then[""], first, "FAILED"), (never, then[""], "CANCELLED")):
        facts = await_state(timed, job, "CANCELLED")
        assert facts["reason"] == f"{before} is {state}, and this job starts only if it completes"
    ran = [job for job, what, _ in times(timed.folder) if what == "start"]
    assert ran[0] == first
    assert set(ran[1:3]) == {then[":any"], then[":fail"]}
    assert ran[3:] == [last]
    # What has ended already is decided at once.
    assert timed.wait(timed.quick("--after", f"{first}:fail", *out)) == "COMPLETED"
    refused = timed.gptctl("submit", "--cluster", "./quick.yaml", "--after", first, "--", "x.py")
    assert refused.returncode == 1
    assert f"--after {first}: that job is FAILED" in refused.stderr
    wrong = timed.gptctl("submit", "--cluster", "./quick.yaml", "--after", f"{first}:never", "--", "x.py")
    assert wrong.returncode == 2
    assert f"use {first}:ok, {first}:any or {first}:fail" in wrong.stderr
