"""Messages about jobs on hosts whose files gptctl sees as copies. Oracle: what arrived at a server in the lab."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.ssh.desk import Desk, await_true
from tests.lab import Lab
from tests.lab.machines import HEAD_ADDRESS

TOKEN = "Tk0123456789abcdef"


@contextmanager
def server(lab: Lab, address: str, folder: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Run a server on the head; yield its URL, and what lists the ids of the messages that it has got."""
    log = folder / "messages"
    log.touch()
    process = lab.start(
        "head", sys.executable, "-m", "tests.webhooks", address, str(log), cwd=str(ROOT), stderr=subprocess.DEVNULL
    )
    try:
        await_true(lambda: "\n" in log.read_text(), 30)
        port = log.read_text().split()[0]
        yield f"http://{address}:{port}/hook/{TOKEN}", lambda: log.read_text().split()[1:]
    finally:
        process.kill()


@pytest.mark.long
def test_the_engine_sends_from_a_host(desk: Desk) -> None:
    """The address comes over ssh, and is in no file there."""
    with server(desk.lab, HEAD_ADDRESS, desk.folder) as (url, ids):
        done = desk.run(*desk.quick("--json", "-o", "Launch.notify.env=HOOK"), HOOK=url)
        assert done.returncode == 0, done.stderr
        await_true(lambda: len(ids()) >= 2, 30, lambda: str(ids()))
        time.sleep(0.5)
        found = sorted(each.split(".", 1)[1] for each in ids())
    assert found == ["end.0", "start.0"]
    for host in ("ssh1", "ssh2", "private1"):
        assert desk.on(host, f"grep -rl {TOKEN} {desk.run_root}") == ""


@pytest.mark.long
def test_a_watcher_sends_what_hosts_cannot(desk: Desk) -> None:
    """The server listens on the head's loopback address, which no host reaches. Exactly once, after the engine gave up."""
    with server(desk.lab, "127.0.0.1", desk.folder) as (url, ids):
        words = desk.quick("-o", "Launch.notify={env: HOOK, on: [start, end]}", "--wait", JOB_SECONDS="1")
        done = desk.run(*words, HOOK=url)
        assert done.returncode == 0, done.stderr
        time.sleep(0.5)  # the server writes down what it has got
        found = sorted(each.split(".", 1)[1] for each in ids())
    tried = desk.on("ssh1", f"cat {desk.run_root}/*/notifications/*")
    assert found == ["end.0", "start.0"]
    assert "Connection refused" in tried
    assert "delivered" not in tried
