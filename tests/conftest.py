"""Fixtures for all tests: check a config given as text, and run gptctl as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from gptctl.spec.check import Checked, check_config
from trainer.config import Override

# A busy machine may be slow: that must not fail a property test.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# A shell starts background jobs with SIGINT ignored, and child processes inherit that. Tests that
# press Ctrl-C need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests and the processes they start must not read the user's own files.
for _elsewhere in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "GPTCTL_HOME", "GPTCTL_NOTIFY"):
    os.environ.pop(_elsewhere, None)

ROOT = Path(__file__).resolve().parents[1]


def save_checkpoint(output: Path, step: int) -> None:
    """What gptctl takes for a checkpoint: it has a manifest, which only the trainer reads."""
    folder = output / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Checked]:
    """Check the text of a run config with `-o` overrides, as `gptctl validate` does."""

    def check_text(text: str, *overrides: str) -> Checked:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return check_config(file, [Override.parse(override) for override in overrides])

    return check_text


@pytest.fixture
def gptctl(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command in an empty folder with an empty home."""

    def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("gptctl")), *arguments]
        env = {**os.environ, "HOME": str(tmp_path / "home"), "COLUMNS": "120", **environment}
        return subprocess.run(command, cwd=cwd or tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


def codes(checked: Checked) -> list[str]:
    return [finding.code for finding in checked.findings]


SIX_MISTAKES = """\
Global:
  device: tpu
  micro_batch_size: 0
Engin:
  max_steps: 10
Engine:
  max_steps: 1.5
Optimizer:
  lr: {max_lr: fast}
Distributed:
  mp_degree: 5
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
