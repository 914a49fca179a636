"""Hosts that answer nonsense, too much or never. Oracles: what they were made to answer, and what is left on them."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from tests.integration.ssh.desk import HOSTS, Desk, await_true
from tests.integration.ssh.test_faults import assert_nothing_happened, refused

NONSENSE = {
    "echo '{}'": "invalid answer to `status`",
    "head -c 100000 /dev/zero | tr '\\0' '['": "invalid answer to `status`",
    """echo '{"agents": [], "result": "COMPLETED", "processes": 0, "boot": ""}'""": "invalid answer to `status`",
    """echo '{"agents": [], "result": ["WHATEVER", ""], "processes": 0, "boot": ""}'""": "invalid answer to `status`",
    "exec cat /dev/zero": "it printed more than 16,777,216 bytes",
}


def test_answers_that_are_nonsense(desk: Desk) -> None:
    """The state is unknown until the host answers again; no other job is affected, and nothing counts as stopped."""
    other = desk.submit_quick()["job"]
    desk.wait(other, "COMPLETED")
    job = desk.submit_quick(JOB_SECONDS="200")["job"]
    script = f"{desk.run_root}/{job}/agent.sh"
    desk.on("ssh1", f"cp {script} {script}.real")
    for body, reason in NONSENSE.items():
        desk.on("ssh1", f"cat > {script} << 'EOF'\n{body}\nEOF")
        rows = {row["job"]: row for row in desk.json("list")}
        assert (rows[job]["state"], rows[other]["state"]) == ("UNKNOWN", "COMPLETED"), body
        assert reason in desk.json("status", job)["reason"]
    desk.on("ssh1", f"echo 'echo {{}}' > {script}")
    done = desk.run("cancel", "--now", job)
    assert done.returncode == 3
    assert "ssh1: invalid answer to `end`" in done.stderr
    desk.on("ssh1", f"cp {script}.real {script}")
    assert desk.run("cancel", "--now", job).returncode == 0
    assert desk.left("ssh1") == []


def engine_python(desk: Desk, *lines: str) -> Path:
    file = desk.lab.folder / "tmp" / f"engine-{desk.folder.name}"
    file.write_text("\n".join(("#!/bin/bash", *lines, "")))
    file.chmod(0o755)
    desk.write_profile("quick", python=str(desk.stand_in), engine_python=str(file))
    return file


def test_a_commit_that_is_answered_with_nonsense(desk: Desk) -> None:
    """The job is in doubt, and never taken for one that was not started; an honest answer settles it."""
    agent = f"""{sys.executable} "$@" | sed -u 's/"endpoint"/"point"/'"""
    is_started = '[[ "$*" != *" engine.pyz "* ]]'
    engine_python(desk, f'{is_started} && exec {sys.executable} "$@"', f'[ "$4" = guard ] || exec echo "{{}}"; {agent}')
    done = desk.run(*desk.quick("--name", "doubt", JOB_SECONDS="200"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "it may have been started; ssh1: invalid answer to `abandon`" in done.stderr
    engine_python(desk, f'exec {sys.executable} "$@"')
    (job,) = desk.json("list")
    assert job["state"] == "RUNNING"
    assert desk.run("cancel", "--now", job["job"]).returncode == 0


def test_an_engine_python_that_hangs_leaves_nothing(desk: Desk) -> None:
    """Also if gptctl is killed meanwhile."""
    file = engine_python(desk, "sleep 1000")
    refused(desk, f"ssh1: {file} does not start")
    process = desk.start(*desk.quick())
    await_true(lambda: all(desk.on(host, "pgrep -u gpt -x sleep") for host in HOSTS), 20)
    desk.lab.signal(process, signal.SIGKILL)
    process.wait()
    assert_nothing_happened(desk)


def test_a_login_shell_that_never_stops_talking(desk: Desk) -> None:
    """Line by line, or in one line that never ends."""
    try:
        desk.on("ssh1", "echo 'while sleep 0.5; do echo welcome; done' > ~/.bashrc")
        began = time.monotonic()
        done = desk.run(*desk.quick(), timeout=100)
        assert time.monotonic() - began < 60
        assert done.returncode == 3
        assert "ssh1: no answer in 5 s" in done.stderr
        desk.on("ssh1", "echo 'exec cat /dev/zero' > ~/.bashrc")
        done = desk.run(*desk.quick(), timeout=100)
        assert done.returncode == 3
        assert "ssh1: unexpected reply from its agent" in done.stderr
    finally:
        desk.on("ssh1", "rm ~/.bashrc")
    desk.lab.run("ssh1", "pkill", "-9", "-u", "gpt", check=False)
    assert_nothing_happened(desk)


def signal_agent(desk: Desk, job: str, host: str) -> None:
    file = f"{desk.run_root}/{job}/agent.{HOSTS.index(host)}.json"
    desk.on(host, f"kill -USR1 {json.loads(desk.on(host, f'cat {file}'))['pid']}")


def test_usr1_stops_the_job(desk: Desk) -> None:
    """As it does on every other kind of cluster. An agent of another host kills its ranks before it exits."""
    job = desk.submit_quick(JOB_SECONDS="200")["job"]
    await_true(lambda: all(desk.ran(host) for host in HOSTS), 20)
    signal_agent(desk, job, "ssh1")
    assert "SIGUSR1" in desk.wait(job, "STOPPED")["reason"]
    job = desk.submit_quick(JOB_SECONDS="200")["job"]
    await_true(lambda: all(desk.on(host, f"ls {desk.run_root}/{job}/ran") for host in HOSTS), 20)
    signal_agent(desk, job, "ssh2")
    desk.wait(job, "FAILED")
    assert [desk.left(host) for host in HOSTS] == [[], [], []]
