"""What others can read of a job. Oracle: the modes of all its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.local.conftest import Jobs
from tests.modes import not_private


@pytest.fixture
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_usual_umask")
def test_nobody_else_can_read_anything_of_a_job(jobs: Jobs, tmp_path: Path) -> None:
    """Under the usual umask: a job that fails and restarts, one that is cancelled, a sweep and a queue."""
    home = tmp_path / "its-home"
    env = {"GPTCTL_HOME": str(home), "XDG_STATE_HOME": str(tmp_path / "state")}
    failed = jobs.quick("--max-restarts", "1", QUICK_CODE="1", **env)
    done = jobs.gptctl("wait", failed, **env)
    assert done.returncode == 1, done.stderr
    (jobs.folder / "quick").write_text("#!/bin/sh\nexec sleep 100\n")
    cancelled = jobs.quick("--queue", "--name", "cancelled", **env)
    for command in (["status", cancelled], ["logs", cancelled], ["cancel", "--now", cancelled], ["list"]):
        assert jobs.gptctl(*command, **env).returncode == 0, command
    assert not_private(home, tmp_path / "state", jobs.folder / "runs" / failed, jobs.folder / "runs" / cancelled) == []
