"""The trainer's command line, its place in the world, its threads, and the text it writes. Oracles: written by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config.flags import parse_arguments
from trainer.errors import UserError
from trainer.layout import Machines
from trainer.mesh import machines
from trainer.program import configure_threads
from trainer.stop import StopRequest


def test_all_forms_of_arguments() -> None:
    words = ["-c", "run.yaml", "-o", "Engine.max_steps=5", "trainer_config.max_epochs=2", "--use_amp", "--mp_degree=2", "--max_lr", "-1e-4"]  # fmt: skip
    path, overrides = parse_arguments(words)
    assert path == "run.yaml"
    assert [(override.key, override.value) for override in overrides] == [
        ("use_amp", "true"),
        ("mp_degree", "2"),
        ("max_lr", "-1e-4"),
        ("Engine.max_steps", "5"),
        ("trainer_config.max_epochs", "2"),
    ]
    assert parse_arguments(["--config=a.yaml", "--override=a.b=c=d"])[1][0].value == "c=d"
    assert parse_arguments(["--use_amp", "Engine.max_steps=5"])[1][0].value == "true"
    assert parse_arguments(["--input_dir", "./a=b"])[1][0].value == "./a=b"
    assert parse_arguments(["--eval_freq", "-1"])[1][0].value == "-1"
    assert parse_arguments([]) == (None, [])


@pytest.mark.parametrize("words", [["-c"], ["-o"], ["run.yaml"], ["-x"], ["-o", "nonsense"], ["--", "a"], ["-o="]])
def test_wrong_arguments(words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments(words)
    assert caught.value.hint


def test_the_world_is_what_the_launcher_says() -> None:
    assert machines({}) == Machines(1, 1)
    torchrun = {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert machines({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **torchrun}) == Machines(2, 4)
    assert machines({"WORLD_SIZE": "8", **torchrun}) == Machines(1, 8)
    assert machines({"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", **torchrun}) == Machines(1, 7)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is invalid"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 is invalid"),
        ({"RANK": "abc"}, "RANK=abc is invalid"),
        ({"RANK": "5"}, "RANK=5 and LOCAL_WORLD_SIZE=1 contradict WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 and LOCAL_WORLD_SIZE=2 contradict WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3", "RANK": "0"}, "LOCAL_WORLD_SIZE=3 contradict WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "but MASTER_PORT is not set"),
    ],
)
def test_half_a_world_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        machines(environ)
    assert "torchrun" in caught.value.hint


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of threads that somebody chose stays, unless it is torchrun's 1."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for environ, threads in [
        ({}, "8"),
        ({"LOCAL_WORLD_SIZE": "2"}, "4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "1"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}, "3"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, "1"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, "4"),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, "8"),
    ]:
        monkeypatch.setattr(os, "environ", dict(environ))
        configure_threads()
        assert os.environ["OMP_NUM_THREADS"] == threads
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_signals_leave_a_note_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        assert stop.signal == ""
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_interrupt_while_torch_is_imported() -> None:
    """The real import, interrupted when the kernel says that torch's library is being loaded."""
    command = [sys.executable, "-m", "trainer.tasks.export_weights", "nowhere", "--output", "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=50), process.returncode) == ("", "interrupted\n", 130)
