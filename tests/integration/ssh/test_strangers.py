"""Strangers knock at the agent of the first host while jobs start. Oracles: every job starts on all its hosts, and what
`/proc/net` says about who listens where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk, await_true
from tests.lab import strangers

GPT = "2000"  # the user of the lab


@contextmanager
def program(desk: Desk, host: str, *words: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A part of strangers.py on a host."""
    with desk.lab.start(host, sys.executable, strangers.__file__, *words, stdout=subprocess.PIPE, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def slow_host(desk: Desk, flag: Path) -> None:
    """Make the agent of private1 wait for a file, so that the first host's agent waits for it."""
    file = desk.lab.folder / "tmp" / f"slow-{desk.folder.name}"
    wait = f'if [ "$(hostname) $3" = "private1 engine.pyz" ]; then while ! [ -e {flag} ]; do sleep 0.05; done; fi'
    file.write_text(f'#!/bin/bash\n{wait}\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    desk.write_profile("quick", python=str(desk.stand_in), engine_python=str(file), start_timeout=30)


@pytest.mark.parametrize(
    ("launches", "each"), [(1, 300), pytest.param(10, 800, marks=pytest.mark.long)], ids=["300", "8000"]
)
def test_strangers_do_not_disturb_a_launch(desk: Desk, launches: int, each: int) -> None:
    """They come from ssh2, as one of the honest agents does, and while all of them knock the last host joins."""
    flag = desk.lab.folder / "tmp" / f"flag-{desk.folder.name}"
    knock = ("knock", ADDRESSES["ssh1"], str(each), str(flag))
    started, knocked = 0, 0
    with (
        program(desk, "ssh1", "watch", GPT) as watch,
        program(desk, "ssh2", *knock, stdin=watch.stdout) as crowd,
    ):
        assert crowd.stdout
        for number in range(launches):
            slow_host(desk, Path(f"{flag}.{number}"))
            done = desk.run(*desk.quick(), timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            address, number_of_strangers = crowd.stdout.readline().split()
            assert address == ADDRESSES["ssh1"]
            knocked += int(number_of_strangers)
            # Ranks of a job start on all hosts at about the same time.
            await_true(lambda jobs=number + 1: all(len(desk.ran(host)) == jobs for host in HOSTS), 20)
            started += 1
    print(f"{knocked} strangers during {launches} launches: {started} started")
    assert started == launches
    assert knocked >= launches * each
