"""The trainer's command line, its place in the world, its threads, and the text it writes. Oracles: written by hand."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.unit.test_model import CPU, model_config
from trainer.__main__ import configure_threads
from trainer.config.flags import parse_arguments
from trainer.config.sections import Generation
from trainer.errors import UserError
from trainer.generate import generate
from trainer.layout import Machines
from trainer.mesh import machines
from trainer.model import build_model
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


def test_text_is_generated_as_asked() -> None:
    model = build_model(model_config(), 1, CPU)
    settings = Generation(max_dec_len=30)
    first = generate(model, [1, 2], 61, 16, settings, 1, StopRequest())
    assert first == generate(model, [1, 2], 61, 16, settings, 1, StopRequest())
    assert first != generate(model, [1, 2], 61, 16, settings, 2, StopRequest())
    assert len(first) == 30
    assert max(first) < 61
    assert model.training


def test_greedy_top_k_and_top_p_agree_at_their_limits() -> None:
    """One candidate is left by each of them: the likeliest token, found by a plain loop."""
    model = build_model(model_config(), 1, CPU).eval()
    tokens = [1, 2]
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens[-16:]]))[0, -1, :61].argmax()))
    for settings in (
        Generation(max_dec_len=20, decode_strategy="greedy_search"),
        Generation(max_dec_len=20, top_k=1),
        Generation(max_dec_len=20, top_k=0, top_p=1e-9),
        Generation(max_dec_len=20, temperature=1e-6),
    ):
        assert generate(model, [1, 2], 61, 16, settings, 3, StopRequest()) == tokens[2:]
