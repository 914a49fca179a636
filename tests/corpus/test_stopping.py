"""Training a tokenizer is stopped by a signal, whatever the library does. Oracle: exit codes, and the folder."""

from __future__ import annotations

import os
import random
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

VERB = ("gptctl", "data", "train-tokenizer")
PROGRAM = ("trainer.tasks.train_tokenizer",)
AGAIN = "nothing was written; the same command starts from the beginning"


@pytest.mark.parametrize(
    ("module", "number", "code", "message"),
    [
        (VERB, signal.SIGINT, 130, f"interrupted: {AGAIN}"),
        pytest.param(PROGRAM, signal.SIGTERM, 130, f"stopped by SIGTERM: {AGAIN}", marks=pytest.mark.long),
        pytest.param(VERB, signal.SIGTERM, -signal.SIGTERM, "", marks=pytest.mark.long),
        pytest.param(PROGRAM, signal.SIGINT, 130, f"stopped by SIGINT: {AGAIN}", marks=pytest.mark.long),
        pytest.param(PROGRAM, signal.SIGUSR1, 130, f"stopped by SIGUSR1: {AGAIN}", marks=pytest.mark.long),
    ],
    ids=["verb, SIGINT", "program, SIGTERM", "verb, SIGTERM", "program, SIGINT", "program, SIGUSR1"],
)
def test_a_signal_ends_the_training_at_once(
    tmp_path: Path, module: tuple[str, ...], number: signal.Signals, code: int, message: str
) -> None:
    """Words of 64 KiB keep the library busy for minutes, long after it has read the text."""
    letters = random.Random(1).choices(string.ascii_letters, k=3_000_000)
    (tmp_path / "in.txt").write_text("".join(letters))
    words = [*module, "in.txt", "--output", "tokenizer", "--vocab-size", "30000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while "tokenizers.abi3.so" not in Path(f"/proc/{running.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.6)  # it has read everything
    assert running.poll() is None
    running.send_signal(number)
    began = time.monotonic()
    try:
        _, errors = running.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    print(f"ended {time.monotonic() - began:.2f} s after {number.name}")
    assert running.returncode == code, errors
    assert message in errors
    assert "continue" not in errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == ["in.txt"]
