"""Files of secrets that are not files. Oracles: what the test created, and bash."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from gptctl.backends import Backends
from gptctl.engine.contract import LAUNCH_SCRIPT
from gptctl.jobs.preflight import run_preflight
from gptctl.planning.build import JobIdentity, Site
from gptctl.planning.render import render
from gptctl.spec.check import check_config
from trainer.config import Override


def create(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind != "missing":
        path.write_text("k" * {"empty": 0, "huge": 100_001}.get(kind, 32))
        path.chmod(0 if kind == "locked" else 0o600)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The findings of a job with a secret file of some kind, and its script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    (tmp_path / "run.yaml").write_text("Launch:\n  entrypoint: x.py\n  secrets:\n    TOK: {file: key}\n")

    def made(kind: str):
        create(tmp_path / "key", kind)
        checked, backend = check_config(tmp_path / "run.yaml", []), Backends(print).of("local")
        site = Site(str(tmp_path), "python", "/t")
        plan = backend.plan(checked, site, JobIdentity("gpt-3f9a2c", str(tmp_path / "runs" / "gpt-3f9a2c")))
        found = [each for each in run_preflight(checked, plan, site, backend) if each.code == "S007"]
        return found, render(plan, LAUNCH_SCRIPT)

    return made


KINDS = {
    "missing": "cannot read {}: No such file or directory",
    "pipe": "{} is a named pipe, not a regular file",
    "empty": "{} has 0 bytes; a secret has 1 to 100,000",
    "huge": "{} has 100,001 bytes; a secret has 1 to 100,000",
    "socket": "{} is a socket, not a regular file",
    "device": "{} is a device, not a regular file",
    "folder": "{} is a folder, not a regular file",
    "locked": "cannot read {}: Permission denied",
}


@pytest.mark.parametrize("kind", KINDS)
def test_submit_says_what_it_is_and_where_it_is_written(launch, tmp_path: Path, kind: str) -> None:
    if kind == "locked" and os.geteuid() == 0:
        pytest.skip("root may read every file")
    (found,) = launch(kind)[0]
    assert found.message == KINDS[kind].format(tmp_path / "key")
    assert str(found.place) == f"{tmp_path / 'run.yaml'}:3"


def test_a_regular_file_is_accepted(launch) -> None:
    assert launch("file")[0] == []


@pytest.mark.parametrize("kind", ["missing", "pipe", "device", "folder"])
def test_the_script_of_the_job_refuses_it_at_once(launch, tmp_path: Path, kind: str) -> None:
    """On hosts that submit cannot see. Oracle: bash runs the lines of the script that read the secret."""
    lines = [line for line in launch(kind)[1].splitlines() if line.startswith(("[ -f", "TOK="))]
    script = "\n".join(['fail() { echo "error: $*" >&2; exit 78; }', *lines])
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 78
    assert ended.stderr == (f"error: the file of the secret TOK is missing or not a regular file: {tmp_path / 'key'}\n")


@pytest.mark.parametrize("typed", [["TOK={env: CK}"], ["TOK.file=", "TOK.env=CK"], ["TOK.env=CK"]])
def test_a_reference_that_is_typed_replaces_the_one_of_the_config(tmp_path: Path, typed: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("Launch:\n  secrets:\n    TOK: {file: key}\n")
    overrides = [Override.parse(f"Launch.secrets.{text}") for text in typed]
    checked = check_config(tmp_path / "run.yaml", overrides)
    assert checked.launch.secrets == {"TOK": {"env": "CK"}}
    # In one place, two references are a mistake.
    (tmp_path / "run.yaml").write_text("Launch:\n  secrets:\n    TOK: {file: key, env: CK}\n")
    assert "a secret must be a reference" in str(check_config(tmp_path / "run.yaml", []).findings)
