"""shell, stacks and forward on ssh hosts. Oracles: a program whose stacks and pages are known, and what is left there."""

from __future__ import annotations

import json

import pytest

from tests.integration import held_job
from tests.integration.ssh.desk import ADDRESSES, GPTCTL, Desk, await_true

pytestmark = pytest.mark.long


def test_stacks_shell_and_forward(desk: Desk) -> None:
    """Node 1 is behind a bastion. The job completes, and no process is left on its hosts."""
    private = {"host": "private1", "address": ADDRESSES["private1"], "proxy_jump": "bastion"}
    desk.write_profile("two", hosts=[{"host": "ssh1", "address": ADDRESSES["ssh1"]}, private])
    (desk.folder / "held.py").write_text(held_job.PROGRAM)
    asked = ["--cluster", "two", "--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    job = json.loads(desk.run("submit", "--json", *asked, "--", "held.py").stdout)["job"]
    ports = held_job.ports(desk.run, job, 2)
    held_job.check_stacks(desk.run, job)

    def fetched(url: str) -> str:
        return desk.lab.run("head", *held_job.fetch_command(url)).stdout

    held_job.check_forward(desk.start, desk.lab.signal, fetched, job, ports[1])
    assert held_job.release(desk.run, job, 2, folders=2) == ["ssh1", "private1"]
    assert desk.wait(job, "COMPLETED")["state"] == "COMPLETED"
    for host in ("ssh1", "private1"):
        await_true(lambda host=host: desk.left(host) == [], 20, lambda host=host: str(desk.left(host)))


def test_terminals_and_killed_sessions(desk: Desk) -> None:
    (desk.folder / "held.py").write_text(held_job.PROGRAM)
    asked = ["--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", "-o", "Global.device=cpu"]
    job = json.loads(desk.run("submit", "--json", *asked, "--", "held.py").stdout)["job"]
    ports = held_job.ports(desk.run, job, 2)
    where = {"cwd": str(desk.folder), "env": desk.env, "user": "gpt", "check": False}
    held_job.check_terminal(lambda line: desk.lab.run("head", "bash", "-c", line, **where), f"{GPTCTL} shell {job}")

    def count(mark: str) -> int:
        return len(desk.on("ssh2", f"pgrep -f '[^ ]*{mark}$'").split())

    held_job.check_kill(desk.start, desk.lab.signal, count, job, ports[1])
    assert desk.run("cancel", "--now", job).returncode == 0
