"""A backend is one class and one line: every verb works with one that gptctl has never heard of.

Oracle: the same jobs, states and logs as on the local cluster.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local.toy_backend import ToyBackend

HERE = Path(__file__).parent
WITH_TOY = """
from gptctl.spec.cluster_kinds import KINDS, ClusterKind
KINDS["toy"] = ClusterKind("toy_backend:ToyBackend", is_one_machine=True)
from gptctl.__main__ import main
main()
"""


class ToyUser:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "clusters").mkdir()
        (folder / "clusters/shop.yaml").write_text(f"kind: toy\nrun_root: {folder}/runs\npython: {sys.executable}\n")
        (folder / "hello.py").write_text(
            "import os, sys, time\nprint('hello from rank', os.environ['RANK'], flush=True)\ntime.sleep(float(sys.argv[1]))\n"
        )
        self.env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(HERE)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITH_TOY, *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=90)

    def json(self, verb: str, *arguments: str) -> Any:
        done = self.run(verb, "--json", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def user(tmp_path: Path) -> ToyUser:
    return ToyUser(tmp_path)


def test_it_has_forty_lines() -> None:
    assert len(inspect.getsource(ToyBackend).splitlines()) <= 40


def test_a_job_from_submit_to_its_end(user: ToyUser) -> None:
    done = user.run("submit", "--cluster", "shop", "--gpus-per-node", "2", "--follow", "--", "hello.py", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a toy starts it" in done.stderr
    assert "hello from rank 0" in done.stdout
    assert "hello from rank 1" in done.stdout
    (row,) = user.json("list")
    assert (row["state"], row["cluster"], row["world_size"]) == ("COMPLETED", "shop", 2)
    assert user.json("status")["exit_codes"] == {"0": 0}
    refused = user.run("fetch")
    assert refused.returncode == 2
    assert "visible from this machine" in refused.stderr


def test_a_job_is_cancelled(user: ToyUser) -> None:
    job = user.json("submit", "--cluster", "shop", "--gpus-per-node", "1", "--", "hello.py", "60")
    assert user.json("status")["state"] == "RUNNING"
    assert user.run("cancel", job["job"], "--now").returncode == 0
    assert user.json("status")["state"] == "CANCELLED"


def test_configs_are_checked_and_rendered_for_it(user: ToyUser) -> None:
    assert user.run("clusters", "check", "shop").stdout == "shop: ready\n"
    shown = user.run(
        "render", "--cluster", "shop", "--style", "standalone", "--gpus-per-node", "2", "--", "hello.py", "0"
    )
    assert "--standalone --nproc-per-node=2" in shown.stdout
    wrong = user.run("submit", "--cluster", "shop", "--style", "sbatch", "--", "hello.py", "0")
    assert wrong.returncode == 1
    assert "A006 Launch.style" in wrong.stderr
