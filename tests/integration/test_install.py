"""The wheel in a virtual environment of its own, without torch, away from the checkout: what a login node has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NEEDED = ["click", "pyyaml", "rich", "jinja2"]  # what the commands tried here import


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of a virtual environment with the wheel in it."""
    place = tmp_path_factory.mktemp("install")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = place.glob("*.whl")
    assert run(sys.executable, "-m", "venv", place / "venv", cwd=place).returncode == 0
    pip = [place / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for words in (["-c", ROOT / "constraints.txt", *NEEDED], ["--no-deps", wheel]):
        result = run(*pip, *words, cwd=place)
        assert result.returncode == 0, result.stderr
    return place / "venv"


def test_there_is_no_torch(installed: Path) -> None:
    result = run(installed / "bin" / "python", "-c", "import torch", cwd=installed)
    assert "No module named 'torch'" in result.stderr


def test_the_whole_of_validate_works(installed: Path, tmp_path: Path) -> None:
    gptctl = installed / "bin" / "gptctl"
    assert run(gptctl, "init", "mp2-sharding4", cwd=tmp_path).returncode == 0
    valid = run(gptctl, "validate", "config", cwd=tmp_path)
    assert (valid.returncode, valid.stdout.splitlines()[0]) == (0, "config.yaml: valid")
    assert (
        run(
            gptctl,
            "validate",
            "config",
            "--cluster",
            "slurm-example",
            "--nodes",
            "2",
            "--gpus-per-node",
            "4",
            cwd=tmp_path,
        ).returncode
        == 0
    )
    wrong = run(gptctl, "validate", "config", "--nodes", "3", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "layouts that fit" in wrong.stdout
    for arguments in (
        ["topo"],
        ["schema"],
        ["rules"],
        ["init", "--list"],
        ["validate", "--resolved"],
        ["completion", "bash"],
    ):
        assert run(gptctl, *arguments, cwd=tmp_path).returncode == 0


def test_templates_and_clusters_are_inside_the_package(installed: Path) -> None:
    (package,) = installed.glob("lib/python*/site-packages/gptctl")
    for folder in ("templates/configs", "clusters"):
        shipped = {file.name for file in (package / folder).iterdir()}
        assert shipped == {file.name for file in (ROOT / folder).iterdir()}
    assert not list(installed.glob("lib/python*/site-packages/tests"))


def test_python_m_gptctl_is_the_same_command(installed: Path, tmp_path: Path) -> None:
    result = run(installed / "bin" / "python", "-m", "gptctl", "--version", cwd=tmp_path)
    assert result.stdout.startswith("gptctl, version ")
