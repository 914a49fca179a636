"""Templates and the trainer cannot import the engine's contract on a node. Oracle: their source text."""

from __future__ import annotations

import re

import pytest

from gptctl.engine import contract
from tests.conftest import ROOT

EXIT_CODES = {
    "NO_ENGINE_PYTHON": "templates/jobs/job.sbatch.j2",
    "CANNOT_CREATE": "templates/jobs/launch.sh.j2",
    "CANNOT_UNPACK": "templates/remote/receive_job.sh",
    "CANNOT_START": "templates/jobs/agent.sh.j2",
    "NO_SUCH_JOB": "templates/remote/ask_host.sh",
}
WORDS = {
    "RUN_DIR_VARIABLE": "templates/jobs/launch.sh.j2",
    "ROLL_BACK_VARIABLE": "templates/jobs/agent.sh.j2",
    "CANCELLED_FILE": "templates/jobs/launch.sh.j2",
    "TOKEN": "templates/remote/roll_back.sh",
    "ENGINE_FILE": "templates/jobs/job.sbatch.j2",
    "CLAIM": "templates/jobs/job.sbatch.j2",
    "UNRECOVERABLE_FILE": "trainer/rank_log.py",
    "CHECKPOINT_KEY_VARIABLE": "trainer/checkpoint/signing.py",
}


@pytest.mark.parametrize(("name", "file"), EXIT_CODES.items())
def test_exit_codes(name: str, file: str) -> None:
    assert re.search(rf"exit {getattr(contract, name)}\b", (ROOT / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "file"), WORDS.items())
def test_names(name: str, file: str) -> None:
    assert getattr(contract, name) in (ROOT / file).read_text(encoding="utf-8")
