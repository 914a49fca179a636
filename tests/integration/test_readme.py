"""Every command in README.md and docs/quickstart.md works. Oracle: its exit code, in an empty folder with an empty home.

What a reader waits for is shortened: `gptctl init` is followed by an edit of its config (SHORTER), and
`Engine.max_steps` on a command line becomes 3. `char-gpt-3f9a2c` stands for the latest job. What needs Slurm, ssh or an
installation is rendered with --dry-run or parsed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptctl.engine.processes import kill_all
from tests.conftest import ROOT
from tests.pages import Command, commands, files
from tests.unit.test_docs import parse

SHORTER = {"max_steps": 2, "logging_freq": 1, "eval_iters": 1, "save_steps": 2}
ELSEWHERE = re.compile(r"--cluster (a800|lab)\b|^gptctl (hosts|fetch)\b")
A_JOB = "char-gpt-3f9a2c"


class Reader:
    """Somebody who types what the pages show, in the order of the pages, and nothing twice."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.typed = folder, set()
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "clusters").mkdir()
        for name, example in (("a800", "slurm-example"), ("lab", "ssh-example")):
            text = (ROOT / "clusters" / f"{example}.yaml").read_text(encoding="utf-8").replace(example, name)
            text = re.sub(r"^run_root: .*", f"run_root: {folder}/elsewhere", text, flags=re.MULTILINE)
            (folder / "clusters" / f"{name}.yaml").write_text(text, encoding="utf-8")

    def type(self, command: Command) -> None:
        if command in self.typed:
            return
        self.typed.add(command)
        line = self.adapted(command.line)
        if line:
            done = self.run(line)
            said = f"$ {line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            assert done.returncode == (1 if command.is_refused else 0), said
        if command.line == "gptctl init":
            self.shorten()

    def adapted(self, line: str) -> str:
        """What is run in its place; nothing where it can only be looked at."""
        first, *rest = line.split()
        if first == "make":
            return f"make -n -C {ROOT} {rest[0]}"
        if first in ("pip", "source"):
            return ""
        assert first == "gptctl", f"nothing here knows how to try {line}"
        if not ELSEWHERE.search(line):
            line = line.replace(A_JOB, self.latest_job()) if A_JOB in line else line
            return re.sub(r"Engine\.max_steps=\d+", "Engine.max_steps=3", line)
        if rest[0] == "submit":
            return f"{line} --dry-run"
        parse(rest)
        return ""

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "HOME": str(self.folder / "home"), "PATH": path}
        command = ["bash", "-c", line]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600)

    def latest_job(self) -> str:
        """Of the name that the pages show."""
        jobs = [str(row["job"]) for row in json.loads(self.run("gptctl list --json").stdout)]
        return [job for job in jobs if job.startswith(A_JOB[:-6])][-1]

    def shorten(self) -> None:
        file = self.folder / "config.yaml"
        text = file.read_text(encoding="utf-8")
        for key, value in SHORTER.items():
            text, count = re.subn(rf"^( +{key}:) .*", rf"\1 {value}", text, flags=re.MULTILINE)
            assert count == 1, key
        file.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    yield Reader(folder)
    for run in (folder / "runs").glob("*"):
        assert not kill_all(str(run))


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_what_a_page_shows_works(reader: Reader, page: str) -> None:
    for name, text in files(ROOT / page).items():
        (reader.folder / name).write_text(text, encoding="utf-8")
    shown = commands(ROOT / page)
    assert shown
    for command in shown:
        reader.type(command)


@pytest.mark.long
@pytest.mark.parametrize("example", ["char-gpt", "ddp-script", "four-d"])
def test_examples_run_as_they_are(tmp_path: Path, example: str) -> None:
    """The first submit of each example, unchanged."""
    folder = ROOT / "examples" / example
    reader = Reader(tmp_path)
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    line = next(command.line for command in commands(folder / "README.md") if command.line.startswith("gptctl submit"))
    done = reader.run(line)
    assert done.returncode == 0, done.stdout + done.stderr
