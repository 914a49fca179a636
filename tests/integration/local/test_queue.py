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


def await_reason(jobs, job: str, reason: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while jobs.waits_for(job) != reason:
        assert time.monotonic() < deadline, jobs.waits_for(job)
        time.sleep(0.05)


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
    facts = timed.status(waiting[3])
    assert facts["reason"] == f"waits for {first} and 3 others (4 of 4 in the queue)"
    assert (facts["state"], facts["attempts"]) == ("PENDING", 0)
    os.kill(json.loads((timed.run_dir(waiting[0]) / "claim.json").read_text())["pid"], signal.SIGKILL)
    assert timed.gptctl("cancel", waiting[1], **out).stdout.strip() == f"{waiting[1]}: CANCELLED"
    facts = timed.status(waiting[0])
    assert facts["state"] == "LOST"
    assert "while it was waiting to start" in facts["reason"]
    await_reason(timed, waiting[2], f"waits for {first} (1 of 2 in the queue)")
    reason = f"waits for {first} and {waiting[2]} (2 of 2 in the queue)"
    await_reason(timed, waiting[3], reason)
    # `wait` says what the job waits for.
    assert f"{waiting[3]}: PENDING: {reason}" in timed.gptctl("wait", waiting[3], "--timeout", "0").stderr
    (timed.folder / "go").touch()
    assert timed.ended(first, *waiting[2:]) == ["COMPLETED"] * 3
    assert [job for job, what, _ in times(timed.folder) if what == "start"] == [first, *waiting[2:]]
    queue = timed.folder / "home/.local/state/gptctl/queue"
    assert list(queue.glob("*/*.ticket")) == []
    assert queue.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_cancel_frees_the_place_of_a_suspended_job(timed) -> None:
    """Oracle: the job behind it runs. While it is suspended, it keeps its place."""
    out = ["--env", f"OUT={timed.folder}"]
    first = timed.quick(*out, "--env", "HOLD=1")
    second, third = timed.quick("--queue", *out), timed.quick("--queue", *out)
    os.kill(json.loads((timed.run_dir(second) / "claim.json").read_text())["pid"], signal.SIGSTOP)
    (timed.folder / "go").touch()
    await_reason(timed, third, f"waits for {second} (2 of 2 in the queue)")
    assert timed.gptctl("cancel", second).stdout.strip() == f"{second}: CANCELLED"
    assert timed.ended(first, second, third, seconds=20) == ["COMPLETED", "CANCELLED", "COMPLETED"]


def test_ranks_without_a_supervisor_keep_their_place(timed) -> None:
    """Oracle: the second job starts when the processes of the first have ended, not when its supervisor is killed."""
    out = ["--env", f"OUT={timed.folder}"]
    first = timed.quick(*out, "--env", "HOLD=1")
    deadline = time.monotonic() + 30
    while not (timed.folder / "times").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(json.loads((timed.run_dir(first) / "claim.json").read_text())["pid"], signal.SIGKILL)
    second = timed.quick("--queue", *out)
    await_reason(timed, second, f"waits for {first} (1 of 1 in the queue)")
    (timed.folder / "go").touch()
    assert timed.ended(second) == ["COMPLETED"]
    assert [what for _, what, _ in times(timed.folder)] == ["start", "end", "start", "end"]


def test_jobs_after_another(timed) -> None:
    """Each starts when the other has ended as it asked for; one that never can is CANCELLED, and says why."""
    out = ["--env", f"OUT={timed.folder}"]
    first = timed.quick(*out, "--env", "HOLD=1", "--env", "CODE=5")
    then = {when: timed.quick("--after", f"{first}{when}", *out) for when in ("", ":any", ":fail")}
    last = timed.quick("--after", f"{then[':any']}", "--after", f"{then[':fail']}:ok", "--queue", *out)
    never = timed.quick("--after", then[""], *out)
    assert timed.status(then[""])["reason"] == f"waits for {first} to complete"
    assert timed.waits_for(then[":fail"]) == f"waits for {first} to fail"
    assert timed.waits_for(last) == f"waits for {then[':any']} to complete"
    (timed.folder / "go").touch()
    assert timed.ended(first, then[":any"], then[":fail"], last) == ["FAILED"] + ["COMPLETED"] * 3
    for job, before, state in ((then[""], first, "FAILED"), (never, then[""], "CANCELLED")):
        assert timed.ended(job) == ["CANCELLED"]
        assert timed.status(job)["reason"] == f"{before} is {state}, and this job starts only if it completes"
    ran = [job for job, what, _ in times(timed.folder) if what == "start"]
    assert ran[0] == first
    assert set(ran[1:3]) == {then[":any"], then[":fail"]}
    assert ran[3:] == [last]
    # What has ended already is decided at once.
    assert timed.ended(timed.quick("--after", f"{first}:fail", *out)) == ["COMPLETED"]
    refused = timed.gptctl("submit", "--cluster", "./quick.yaml", "--after", first, "--", "x.py")
    assert refused.returncode == 1
    assert f"--after {first}: that job is FAILED" in refused.stderr
    wrong = timed.gptctl("submit", "--cluster", "./quick.yaml", "--after", f"{first}:never", "--", "x.py")
    assert wrong.returncode == 2
    assert f"use {first}:ok, {first}:any or {first}:fail" in wrong.stderr


# Four GPUs; somebody else's process is on the second, and the memory of the third is full.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu*) for i in 0 1 2 3; do [ $i = 2 ] && used=9000 || used=10; echo "$i, GPU-$i, $used, 10000"; done ;;
*) echo "GPU-1, 4711" ;;
esac
"""


def test_jobs_get_free_gpus(timed) -> None:
    """Oracle: the CUDA_VISIBLE_DEVICES of each job; nvidia-smi is a stand-in, since no GPU is here."""
    tools = timed.folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    noted = 'echo "$CUDA_VISIBLE_DEVICES" > "$OUT/gpus.$GPTCTL_JOB"\n'
    (timed.folder / "quick").write_text(TIMED.replace("while", f"{noted}while", 1))
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    own = ["--queue", "--env", f"OUT={timed.folder}", "--env", "HOLD=1"]
    first = timed.quick("--gpus-per-node", "1", *own, **env)
    second = timed.quick("--devices", "3", *own, **env)
    third = timed.quick("--gpus-per-node", "2", *own, **env)
    fourth = timed.quick("--devices", "GPU-1", *own, **env)
    await_reason(timed, third, f"waits for {first} and {second} (1 of 2 in the queue)")
    (timed.folder / "go").touch()
    assert timed.ended(first, second, third) == ["COMPLETED"] * 3
    devices = {job: (timed.folder / f"gpus.{job}").read_text().strip() for job in (first, second, third)}
    assert devices == {first: "0", second: "3", third: "0,3"}
    await_reason(timed, fourth, "waits for GPU 1: other processes use 2 of 4 (1 of 1 in the queue)")


GROUP = """
import sys
from gptctl.backends import Backends
from gptctl.engine.launch_plan import StartConditions
from gptctl.jobs.store import Store
from gptctl.jobs.submit import prepare, submit, this_site
from gptctl.spec.check import check_config
from trainer.config import Override

keys = {"cluster": "./quick.yaml", "entrypoint": "x.py", "env.OUT": sys.argv[1], "env.HOLD": "1"}
checked = check_config(None, [Override(f"Launch.{key}", value, "test") for key, value in keys.items()])
store, backends = Store(), Backends(print)
for _ in range(4):
    conditions = StartConditions(queue=True, group="sweep-1", group_limit=2)
    job = prepare(checked, store, backends, this_site(), conditions=conditions)
    print(submit(job, store, backends).record.id)
"""


def test_a_group_has_a_limit(timed) -> None:
    """As sweeps use it: two of four run at the same time, and a job outside of the group waits for all of them."""
    env = {**os.environ, "HOME": str(timed.folder / "home")}
    command = [sys.executable, "-c", GROUP, str(timed.folder)]
    done = subprocess.run(command, cwd=timed.folder, env=env, capture_output=True, text=True, check=True)
    members = done.stdout.split()
    other = timed.quick("--queue", "--env", f"OUT={timed.folder}")
    both = f"waits for {members[0]} and {members[1]}"
    await_reason(timed, members[2], f"{both} (group sweep-1: 2 at once)")
    await_reason(timed, other, f"{both} (3 of 3 in the queue)")
    (timed.folder / "go").touch()
    assert timed.ended(*members, other) == ["COMPLETED"] * 5
    running, most = 0, 0
    for job, what, _ in times(timed.folder):
        running += 1 if what == "start" else -1
        most = max(most, running)
        assert running <= (1 if job == other else 2)
    assert most == 2
