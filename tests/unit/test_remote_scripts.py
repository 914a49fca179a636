"""Scripts that are sent to other machines. Oracles: shellcheck on the files, bash and its effect on what is sent."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptctl.remote.scripts import in_one_line, remote_command
from tests.conftest import ROOT

SCRIPTS = sorted(file.name for file in (ROOT / "templates/remote").glob("*.sh"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_sent_is_one_line_that_bash_reads(name: str) -> None:
    text = in_one_line(name)
    assert "\n" not in text
    assert "# " not in text
    assert subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True).stderr == b""


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_accepts_them(name: str) -> None:
    checked = subprocess.run(["shellcheck", str(ROOT / "templates/remote" / name)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_roll_back_kills_the_processes_of_one_job_only(tmp_path: Path) -> None:
    jobs = [tmp_path / "a b", tmp_path / "c"]
    for job in jobs:
        job.mkdir()
        (job / ".token").write_text("mine")
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"GPTCTL_RUN_DIR": str(job)})
        for job in jobs
    ]
    time.sleep(0.3)  # until each has its own environment
    try:
        subprocess.run(remote_command("roll_back.sh", str(jobs[1]), "another's"), check=True)
        assert jobs[1].exists()
        subprocess.run(remote_command("roll_back.sh", str(jobs[0]), "mine"), check=True)
        assert sleepers[0].wait(5) == -9
        assert not jobs[0].exists()
        assert sleepers[1].poll() is None
    finally:
        sleepers[1].kill()
        sleepers[1].wait()
