"""Tags, notes and the removal of old runs with real jobs. Oracles: what `list --json` says, and the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import save_checkpoint
from tests.integration.local.test_sweep import make
from tests.integration.slurm.login import TINY


def ids(jobs, *words: str) -> list[str]:
    return [row["job"] for row in json.loads(jobs.gptctl("list", "--json", *words).stdout)]


def test_a_resumed_run_keeps_its_tags(jobs) -> None:
    """A rerun is another run: it has none of them."""
    (jobs.folder / "config.yaml").write_text("Engine: {max_steps: 4}\n")
    words = ("config", "--cluster", "./quick.yaml", *(word for key in TINY for word in ("-o", key)))
    refused = jobs.gptctl("submit", *words, "--tag", "a b")
    assert (refused.returncode, (jobs.folder / "runs").exists()) == (2, False)
    first = jobs.submit(*words, "--tag", "exp=lr", "--tag", "draft", "--note", "学习率 3e-4")
    jobs.ended(first)
    (row,) = json.loads(jobs.gptctl("list", "--json").stdout)
    assert (row["tags"], row["note"]) == ({"exp": "lr", "draft": ""}, "学习率 3e-4")
    save_checkpoint(jobs.run_dir(first) / "output", 2)
    resumed = json.loads(jobs.gptctl("resume", first, "--json", "--tag", "exp=wd").stdout)["job"]
    again = json.loads(jobs.gptctl("rerun", first, "--json", "--tag", "fresh").stdout)["job"]
    jobs.ended(resumed, again)
    rows = {row["job"]: row for row in json.loads(jobs.gptctl("list", "--json").stdout)}
    assert (rows[resumed]["tags"], rows[resumed]["note"]) == ({"exp": "wd", "draft": ""}, None)
    assert rows[again]["tags"] == {"fresh": ""}
    assert ids(jobs, "--tag", "draft") == [first, resumed]


@pytest.mark.long
def test_all_jobs_of_a_sweep_have_its_tags(jobs) -> None:
    """Those that are submitted later, too."""
    make(jobs, "parameters: {Engine.max_steps: [2, 3]}\n")
    answer = jobs.gptctl("sweep", "submit", "sweep.yaml", "--json", "--cluster", "./quick.yaml", "--tag", "exp=steps")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    first, second = (each["job"] for each in found["jobs"])
    jobs.ended(first, second)
    assert ids(jobs, "--tag", "exp=steps") == [first, second]
    # As if gptctl had been killed before it submitted the second run.
    (jobs.folder / f"home/.local/state/gptctl/jobs/{second}.json").unlink()
    again = json.loads(jobs.gptctl("sweep", "resume", found["sweep"], "--json").stdout)
    third = again["jobs"][-1]["job"]
    jobs.ended(third)
    assert third in ids(jobs, "--tag", "exp=steps")


def test_a_full_disk_submits_no_job_without_its_tags(jobs, small_disk: Path) -> None:
    """The home of gptctl is on a real file system without space; the folder of runs is not."""
    home = small_disk / "home"
    assert jobs.quick(GPTCTL_HOME=str(home))
    with open(small_disk / "filler", "wb", buffering=0) as filler:
        free = 700 << 10
        while free:
            try:
                filler.write(b"\0" * free)
            except OSError:
                free //= 2
    before = sorted((jobs.folder / "runs").iterdir())
    answer = jobs.gptctl("submit", "--cluster", "./quick.yaml", "--tag", "a=1", "--", "x.py", GPTCTL_HOME=str(home))
    assert answer.returncode == 3
    assert "No space left" in answer.stderr
    assert sorted((jobs.folder / "runs").iterdir()) == before


def test_rm_by_state_leaves_what_another_job_needs(jobs) -> None:
    (jobs.folder / "quick").write_text('#!/bin/sh\n[ -z "$HOLD" ] || sleep 60\nexit 7\n')
    failed, needed = jobs.quick("--tag", "exp=a"), jobs.quick("--tag", "exp=a")
    jobs.ended(failed, needed)
    busy = jobs.quick("--env", "HOLD=1", "--tag", "exp=a")
    # As if it had been started with that checkpoint.
    plan = jobs.run_dir(busy) / "plan.json"
    inputs = [str(jobs.run_dir(needed) / "output" / "step_2")]
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "inputs": inputs}))
    answer = jobs.gptctl("rm", "--tag", "exp=a", "--yes", "--json")
    assert [row["job"] for row in json.loads(answer.stdout)] == [failed]
    assert f"{needed} stays: {needed} is needed by unfinished jobs: {busy}" in answer.stderr
    assert f"{busy} stays: {busy} is RUNNING" in answer.stderr
    folders = {folder.name for folder in (jobs.folder / "runs").iterdir() if not folder.is_symlink()}
    assert folders == {needed, busy}
    jobs.gptctl("cancel", "--now", busy)
