"""Run verbs in this process: faster than the installed command, for tests that need many answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gptctl import cli
from gptctl.engine import file_reading


class Answer(NamedTuple):
    code: int
    out: str
    said: str

    @property
    def ids(self) -> list[str]:
        return [row["job"] for row in json.loads(self.out)]


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run a verb in this process, on the jobs of this folder; a bug raises."""
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPTCTL_DEBUG", "1")

    def run(words: str, *more: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["gptctl", *words.split(), *more])
        monkeypatch.setattr(file_reading, "noticed", {})
        code = cli._run()
        return Answer(code, *capsys.readouterr())

    return run
