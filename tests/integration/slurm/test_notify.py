"""Messages about jobs on Slurm. Oracle: what arrived at a server on the head node."""

from __future__ import annotations

import json
import time

import pytest

from tests.integration.slurm.login import Login, await_true
from tests.integration.ssh.test_notify import server
from tests.lab import Lab
from tests.lab.machines import HEAD_ADDRESS


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


@pytest.mark.long
def test_a_requeued_and_then_cancelled_job_tells_it_from_the_node(login: Login) -> None:
    """Somebody else requeues it, and then cancels it with Slurm's own commands: the engine says what it knows."""
    with server(login.lab, HEAD_ADDRESS, login.folder) as (url, ids):

        def told() -> list[str]:
            return [each.split(".", 1)[1] for each in ids()]

        words = login.quick(
            "--json", "--requeue", "-o", "Launch.notify={env: HOOK, on: [start, end]}", JOB_SECONDS="100"
        )
        done = login.run(*words, HOOK=url)
        assert done.returncode == 0, done.stderr
        job = json.loads(done.stdout)
        await_true(lambda: told() == ["start.0"], 60, lambda: str(told()))
        login.lab.run("head", "scontrol", "requeue", job["scheduler_id"])
        await_true(lambda: "start.1" in told(), 200, lambda: str(told()))
        login.lab.run("head", "scancel", job["scheduler_id"])
        await_true(lambda: "end.1" in told(), 60, lambda: str(told()))
    assert len(told()) == len({*told()})


@pytest.mark.long
def test_a_watcher_sends_what_nodes_cannot(login: Login) -> None:
    """In a folder that both see: the next try is the watcher's. Exactly once."""
    with server(login.lab, "127.0.0.1", login.folder) as (url, ids):
        words = login.quick("--wait", "-o", "Launch.notify={env: HOOK, on: [start, end]}", JOB_SECONDS="1")
        done = login.run(*words, HOOK=url)
        assert done.returncode == 0, done.stderr
        time.sleep(0.5)  # the server writes down what it has got
        found = sorted(each.split(".", 1)[1] for each in ids())
    assert found == ["end.0", "start.0"], done.stderr
