"""The interpreter of gptctl's engine on the batch host of a real Slurm. Oracles: which interpreters exist there, and the
state that gptctl reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slurm.login import Login, await_true, ran
from tests.lab import Lab

PRIVATE = "/dev/shm/venv-of-head"  # /dev/shm is each machine's own


@pytest.fixture
def private_python(lab: Lab) -> Iterator[str]:
    """This environment under a path that only the head has."""
    venv = str(Path(sys.executable).parents[1])
    lab.run("head", "ln", "-s", venv, PRIVATE, check=True)
    yield f"{PRIVATE}/bin/python"
    lab.run("head", "rm", PRIVATE, check=True)


def submit_with(login: Login, python: str, *options: str) -> dict[str, str]:
    """Submit a job of the stand-in with another interpreter than that of the tests."""
    command = [python, "-m", "gptctl", *login.quick("--json", *options)]
    done: subprocess.CompletedProcess[str] = login.lab.run("head", *command, cwd=str(login.folder), env=login.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_an_engine_python_that_is_missing_fails_the_job(lab: Lab) -> None:
    """Also after Slurm has forgotten the job: the reason is recorded."""
    login = Login(lab, engine_python="/nowhere/python3")
    job = login.submit_quick()
    reason = login.wait(job["job"], "FAILED")["reason"]
    assert "no Python 3.10 or newer for gptctl's engine on node1" in reason
    assert "engine_python of profile lab (/nowhere/python3)" in reason
    assert f"the interpreter that ran gptctl submit ({sys.executable})" in reason
    assert "python3 after the setup" in reason
    assert not ran(job)
    result = json.loads((Path(job["run_dir"]) / "result.json").read_text())
    assert (result["state"], result["reason"]) == ("FAILED", reason)


def test_no_interpreter_at_all_fails_the_job(lab: Lab, private_python: str) -> None:
    """The submit interpreter is missing on the nodes, and their python3 is too old."""
    login = Login(lab)
    old = login.folder / "bin" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    lab.profile(login.folder / "quick", **profile_of(login), setup=[f'export PATH="{old.parent}:$PATH"'])
    job = submit_with(login, private_python)
    reason = login.wait(job["job"], "FAILED")["reason"]
    assert "no Python 3.10 or newer for gptctl's engine on node1" in reason
    assert "engine_python of profile lab is not set" in reason
    assert f"the interpreter that ran gptctl submit ({private_python})" in reason
    assert not ran(job)


def test_python3_of_the_setup_runs_the_engine(lab: Lab, private_python: str) -> None:
    """The submit interpreter is missing on the nodes; a python3 that only the setup adds to PATH notes that it was used."""
    login = Login(lab)
    wrapper = login.folder / "bin" / "python3"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$(hostname) $*" >> {wrapper}.used\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    lab.profile(login.folder / "quick", **profile_of(login), setup=[f'export PATH="{wrapper.parent}:$PATH"'])
    job = submit_with(login, private_python)
    plan = json.loads((Path(job["run_dir"]) / "plan.json").read_text())
    assert (plan["engine_python"], plan["submit_python"]) == ("", private_python)
    login.wait(job["job"], "COMPLETED")
    assert len(ran(job)) == 1
    used = Path(f"{wrapper}.used").read_text()
    assert f"node1 -E -S engine.pyz srun_node {job['run_dir']}" in used


def test_python3_may_need_the_setup_to_start(lab: Lab, private_python: str) -> None:
    """The ranks get the environment from before: they run the setup themselves, once."""
    login = Login(lab)
    wrapper = login.folder / "bin" / "python3"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\n[ -n "$MODULE_LIBS" ] || exit 127\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    setup = [f'export PATH="{wrapper.parent}:$PATH"', 'export MODULE_LIBS="a$MODULE_LIBS"']
    keys = {**profile_of(login), "python": str(stand_in_that_notes(login, "MODULE_LIBS"))}
    lab.profile(login.folder / "quick", **keys, setup=setup)
    job = submit_with(login, private_python)
    login.wait(job["job"], "COMPLETED")
    assert (login.folder / "noted").read_text() == "a\n"


def test_a_setup_that_fails_is_the_reason(lab: Lab, private_python: str) -> None:
    login = Login(lab)
    lab.profile(login.folder / "quick", **profile_of(login), setup=["echo no such module >&2; false"])
    job = submit_with(login, private_python)
    assert login.wait(job["job"], "FAILED")["reason"] == "setup failed: echo no such module >&2; false"


def stand_in_that_notes(login: Login, name: str) -> Path:
    """Another interpreter of the ranks, which also writes a variable to a file."""
    noting = login.folder / "noting-python"
    noting.write_text(f'#!/bin/bash\necho "${name}" >> {login.folder}/noted\nexec {login.stand_in} "$@"\n')
    noting.chmod(0o755)
    return noting


def test_a_stop_request_while_the_interpreter_is_chosen(lab: Lab, private_python: str) -> None:
    """The setup may take minutes. The job stops and starts no rank."""
    login = Login(lab)
    waiting = login.folder / "waiting"
    setup = [f"touch {waiting}", "sleep 3"]
    lab.profile(login.folder / "quick", **profile_of(login), setup=setup)
    job = submit_with(login, private_python, "--no-requeue")
    await_true(waiting.exists, 60)
    login.slurm("scancel", "--batch", "--signal=USR1", job["scheduler_id"])
    assert login.wait(job["job"], "STOPPED")["reason"].startswith("the scheduler asked the job to stop")
    assert not ran(job)


def profile_of(login: Login) -> dict[str, str]:
    return {"python": str(login.stand_in), "run_root": str(login.folder / "runs")}
