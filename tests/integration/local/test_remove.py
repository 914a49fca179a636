"""Jobs whose folders are gone, and which job is the latest. The oracle is what status, list and rm print, and the disk."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.terminal import GPTCTL, Run


def test_a_deleted_folder_does_not_rewrite_history(jobs) -> None:
    """State, reason and times before the deletion are those after it."""
    job = jobs.quick("--env", "QUICK_CODE=7")
    assert jobs.wait(job) == "FAILED"
    before = jobs.status(job)
    assert before["exit_codes"] == {"0": 7}
    shutil.rmtree(jobs.run_dir(job))
    after = jobs.status(job)
    assert after["reason"] == f"{before['reason']}; run folder removed"
    for key in ("state", "ended", "attempts", "exit_codes", "endpoint", "created"):
        assert after[key] == before[key], key
    assert "FAILED" in jobs.gptctl("list").stdout
    shown = jobs.gptctl("show", job)
    assert (shown.returncode, "run folder removed" in shown.stdout) == (0, True)
    assert "is missing" in jobs.gptctl("logs", job, "--follow").stderr
    assert "FAILED" in jobs.gptctl("cancel", job).stdout  # nothing to stop


def test_rm_leaves_a_tombstone_and_what_is_outside(jobs) -> None:
    outside = jobs.folder / "precious"
    outside.mkdir()
    (outside / "file").write_text("1")
    job = jobs.quick("--log-dir", "./elsewhere")
    assert jobs.wait(job) == "COMPLETED"
    os.symlink(outside, jobs.run_dir(job) / "link")
    refused = jobs.gptctl("rm", job)
    assert (refused.returncode, jobs.run_dir(job).is_dir()) == (2, True)
    assert "--yes" in refused.stderr
    (answer,) = json.loads(jobs.gptctl("rm", job, "--yes", "--json").stdout)
    assert answer["job"] == job
    assert answer["kept"] == [str(jobs.folder / "elsewhere" / job)]
    assert not any(job in entry.name for entry in (jobs.folder / "runs").iterdir())
    assert not os.path.lexists(jobs.folder / "runs" / "latest")
    assert (outside / "file").read_text() == "1"
    assert (jobs.folder / "elsewhere" / job).is_dir()
    status = jobs.status(job)
    assert (status["state"], status["removed"]) == ("COMPLETED", answer["removed"])
    assert "run folder removed 2" in status["reason"]  # and when
    assert job not in jobs.gptctl("list").stdout
    assert job in jobs.gptctl("list", "--all").stdout
    assert "was removed 2" in jobs.gptctl("logs", job).stderr
    # The id is not given again; removing twice changes nothing.
    assert jobs.quick("--log-dir", "./elsewhere") == f"{job}-2"
    assert json.loads(jobs.gptctl("rm", job, "--yes", "--json").stdout)[0]["removed"] == answer["removed"]


def test_rm_refuses_a_running_job_and_a_folder_of_others(jobs) -> None:
    (jobs.folder / "quick").write_text("#!/bin/sh\nsleep 60\n")
    running, busy = jobs.quick(), jobs.quick()
    refused = jobs.gptctl("rm", running, "--yes")
    assert (refused.returncode, jobs.run_dir(running).is_dir()) == (1, True)
    assert f"gptctl cancel {running}" in refused.stderr
    # A job that waits for it needs its folder, too.
    waiting = jobs.quick("--after", f"{busy}:any", "--after", f"{running}:any")
    jobs.gptctl("cancel", running, "--now")
    refused = jobs.gptctl("rm", running, "--yes")
    assert (refused.returncode, jobs.run_dir(running).is_dir()) == (1, True)
    assert f"{running} is needed by unfinished jobs: {waiting}" in refused.stderr
    jobs.gptctl("cancel", waiting, busy, "--now")
    token = jobs.run_dir(running) / ".token"
    token.write_text("another")
    assert jobs.gptctl("rm", running, "--yes").returncode == 1
    token.unlink()
    moved = jobs.folder / "moved"
    jobs.run_dir(running).rename(moved)
    jobs.run_dir(running).symlink_to(moved)
    assert jobs.gptctl("rm", running, "--yes").returncode == 1
    assert (moved / "plan.json").exists()


def test_rm_asks_on_a_terminal(jobs) -> None:
    job = jobs.quick()
    jobs.wait(job)
    for answer, code, is_left in (("n\n", 1, True), ("y\n", 0, False)):
        asked = Run(GPTCTL, "rm", job, cwd=jobs.folder)
        asked.read_until("[y/N]")
        asked.press(answer.encode())
        assert asked.finish() == code
        assert jobs.run_dir(job).is_dir() == is_left


def test_the_latest_job_is_that_of_this_folder(jobs) -> None:
    """Two folders, one home: each has its own latest job, and a third has none."""
    here = jobs.quick()
    other = jobs.folder / "other"
    other.mkdir()
    (other / "x.py").write_text("print(2)\n")
    there = json.loads(jobs.gptctl("submit", "--json", "--cluster", "../quick.yaml", "--", "x.py", cwd=other).stdout)[
        "job"
    ]
    for job in (here, there):
        jobs.wait(job)
    for verb, cwd, job in (("wait", jobs.folder, here), ("logs", jobs.folder, here)):
        assert jobs.gptctl(verb, cwd=cwd).stderr.splitlines()[0] == f"job {job}", verb
    shown = jobs.gptctl("show", cwd=other)
    assert (shown.stdout.splitlines()[0], shown.stderr) == (f"job {there}", "")
    nowhere = jobs.folder / "nowhere"
    nowhere.mkdir()
    named = jobs.gptctl("status", cwd=nowhere).stderr.splitlines()[0]
    assert named == f"job {there} (the latest job; none was submitted from this folder)"
    assert jobs.gptctl("rm").returncode == 2


def test_the_hash_and_a_prefix_of_keys_are_enough(jobs) -> None:
    job = jobs.quick()
    jobs.wait(job)
    code = job.rpartition("-")[2]
    assert json.loads(jobs.gptctl("status", code, "--json").stdout)["job"] == job
    assert "Launch.nodes" in jobs.gptctl("show", "Launch.nodes").stdout
    scripts = json.loads(jobs.gptctl("show", "--script", "--json").stdout)
    assert scripts["job"] == job
    assert scripts["scripts"]["launch.sh"] == (jobs.run_dir(job) / "launch.sh").read_text()
    assert jobs.gptctl("show", "--script").stdout == scripts["scripts"]["launch.sh"]


@pytest.mark.parametrize("path", ["/missing.log", "workerlog.0", "./"])
def test_logs_of_a_missing_file(gptctl, path: str) -> None:
    answer = gptctl("logs", path)
    assert answer.returncode == 2
    assert f"error: {path} " in answer.stderr
    assert "path of a log file" in answer.stderr
