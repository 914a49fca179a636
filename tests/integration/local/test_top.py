"""`gptctl top` on a real terminal (a pty), with a real job of one rank, and without textual. Oracles: the record of the
job, and what a terminal is told."""

from __future__ import annotations

import json
import signal
from datetime import datetime
from pathlib import Path

import pytest

from tests.integration.local.test_jobs import SMALL
from tests.job_records import add_job
from tests.terminal import GPTCTL, Run, without_sequences

ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"  # the screen of full-screen programs, and back


def test_a_job_is_watched_and_cancelled(jobs) -> None:
    """Opened in the list, followed by its steps, cancelled by a key. Its record says that it was cancelled."""
    jobs.gptctl("init")
    job = jobs.submit(*SMALL, "-o", "Engine.max_steps=100000", "-o", "Engine.logging_freq=5", "--gpus-per-node", "1")
    run = Run(GPTCTL, "top", cwd=jobs.folder)
    run.read_until(job)
    run.press(b"\r")
    run.read_until("log of rank 0")
    run.read_until("/100000  loss")  # a line of its log
    run.press(b"c")
    run.read_until(f"cancel {job}?")
    run.press(b"y")
    run.read_until(f"{job} is cancelled")
    run.press(b"q")
    assert run.finish() == 0
    assert ALTERNATE in run.shown
    assert run.shown.rindex(NORMAL) > run.shown.rindex(ALTERNATE), "the terminal is as it was"
    assert json.loads((jobs.run_dir(job) / "result.json").read_text())["state"] == "CANCELLED"
    # As it was while it ran, and as it is now.
    events = [
        json.loads(line) for line in (jobs.run_dir(job) / "output" / "events.jsonl").read_text().splitlines() if line
    ]
    first = next(event["time"] for event in events if event["event"] == "first step")
    at = datetime.fromtimestamp(first + 0.5).isoformat()
    past = json.loads(jobs.gptctl("top", job, "--json", "--at", at).stdout)
    assert past["detail"]["summary"]["state"] == "RUNNING"
    assert past["detail"]["events"][-1]["text"].startswith(("first step", "checkpoint"))
    now = json.loads(jobs.gptctl("top", job, "--json").stdout)
    assert now["detail"]["summary"]["state"] == "CANCELLED"


@pytest.mark.parametrize("columns", [80, 40])
def test_without_textual(tmp_path: Path, columns: int) -> None:
    """The same picture without keys; Ctrl-C ends it, and the screen is given back."""
    add_job(tmp_path, "gpt-111111", loss=2.5)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['textual'] = None\n")
    where = {"GPTCTL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(hidden)}
    run = Run(GPTCTL, "top", cwd=tmp_path, columns=columns, **where)
    run.read_until("gpt-111111")
    run.read_until("Ctrl-C quits")
    run.press(b"\x03")
    assert run.finish() == 130
    assert run.shown.rindex(NORMAL) > run.shown.rindex(ALTERNATE)
    assert "COMPLETED" in without_sequences(run.shown)


def test_in_a_small_window(tmp_path: Path) -> None:
    """It is drawn again when the window changes."""
    add_job(tmp_path, "gpt-111111", loss=2.5)
    run = Run(
        GPTCTL, "top", "gpt-111111", "--interval", "0.5", cwd=tmp_path, columns=30, GPTCTL_HOME=str(tmp_path / "home")
    )
    run.read_until("COMPLETED")
    assert "q quit" not in run.text, "too narrow for all keys"
    run.resize(100)
    run.read_until("q quit")
    run.press(b"q")
    assert run.finish() == 0


@pytest.mark.parametrize("has_textual", [True, False])
def test_a_signal_gives_the_terminal_back(tmp_path: Path, has_textual: bool) -> None:
    add_job(tmp_path, "gpt-111111", loss=2.5)
    (tmp_path / "hidden").mkdir()
    # A damaged textual is as good as none.
    (tmp_path / "hidden" / "textual.py").write_text("raise RuntimeError('damaged')\n")
    where = {"GPTCTL_HOME": str(tmp_path / "home"), **({} if has_textual else {"PYTHONPATH": str(tmp_path / "hidden")})}
    run = Run(GPTCTL, "top", cwd=tmp_path, **where)
    run.read_until("gpt-111111")
    run.read_until("q quit" if has_textual else "Ctrl-C quits")
    run.child.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    assert run.shown.rindex(NORMAL) > run.shown.rindex(ALTERNATE)
    assert run.shown.rindex(b"\x1b[?25h") > run.shown.rindex(b"\x1b[?25l"), "the cursor is seen again"


def test_a_byte_that_is_not_utf8_is_no_key(tmp_path: Path) -> None:
    """As a Latin-1 terminal sends it."""
    add_job(tmp_path, "gpt-111111", loss=2.5)
    run = Run(GPTCTL, "top", cwd=tmp_path, GPTCTL_HOME=str(tmp_path / "home"))
    run.read_until("q quit")
    run.press(b"\xe4")
    run.press(b"?")
    run.read_until("show and hide this help")
    run.press(b"q")
    run.press(b"q")
    assert run.finish() == 0
