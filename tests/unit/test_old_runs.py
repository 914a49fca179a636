"""`gptctl rm` for old runs. Oracles: the folders on the disk, and what `resume` would continue from before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job_records import DAY, add_job
from tests.terminal import GPTCTL, Run


def plan(verb: Any, words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What would be removed, and why the others stay."""
    answer = verb(f"rm --dry-run --json {words}")
    assert answer.code == 0, answer.said
    found = json.loads(answer.out)
    return {row["job"]: row for row in found["remove"]}, {row["job"]: row["why"] for row in found["stay"]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Old runs: alone, of several jobs, branched, of a chain; and jobs that may still run."""
    add_job(tmp_path, "old-000001", "FAILED", 50)
    add_job(tmp_path, "one-000001", "COMPLETED", 50, [10, 20])
    # A run of three jobs: the second has the newest verified checkpoint, the third only a newer one that is not.
    add_job(tmp_path, "run-000001", "FAILED", 49, [10])
    add_job(tmp_path, "run-000002", "FAILED", 48, {20: True, 25: False}, continues="run-000001")
    add_job(tmp_path, "run-000003", "FAILED", 47, {30: False}, continues="run-000002")
    # Continued twice: each branch needs its own point.
    add_job(tmp_path, "fork-000001", "STOPPED", 46, [10])
    add_job(tmp_path, "fork-000002", "STOPPED", 45, [20], continues="fork-000001")
    add_job(tmp_path, "fork-000003", "FAILED", 44, continues="fork-000001")
    # A chain: both jobs save into the folder of the first one.
    shared = tmp_path / "runs" / "link-000001" / "output"
    add_job(tmp_path, "link-000001", "TIMEOUT", 43, [10])
    add_job(tmp_path, "link-000002", "TIMEOUT", 42, [20], continues="link-000001", output_dir=str(shared))
    # Nothing of it is verified: it can be resumed all the same.
    add_job(tmp_path, "kill-000001", "LOST", 41, {10: False})
    add_job(tmp_path, "live-000001", "RUNNING", 40)
    add_job(tmp_path, "wait-000001", "UNKNOWN", 39, kind="slurm", cluster="farm", handle={"scheduler_id": "17"})
    add_job(tmp_path, "new-000001", "FAILED", 1)
    add_job(tmp_path, "long-000001", "FAILED", 40, ran=39 * DAY)  # it has ended yesterday
    return tmp_path


def test_what_is_old_and_not_needed_goes(verb, runs: Path) -> None:
    going, staying = plan(verb, "--older 30d")
    assert set(going) == {"old-000001", "run-000001", "run-000003", "fork-000003", "link-000002"}
    assert {job: why.rpartition(": ")[2] for job, why in staying.items()} == {
        "one-000001": "step_20",
        "run-000002": "step_20",
        "fork-000001": "step_10",
        "fork-000002": "step_20",
        "link-000001": "step_20",
        "kill-000001": "step_10",
        "live-000001": "live-000001 is RUNNING",
        "wait-000001": staying["wait-000001"].rpartition(": ")[2],
    }
    assert staying["run-000002"].startswith("has the newest verified checkpoint of the run of run-000003")
    assert staying["kill-000001"].startswith("has the newest checkpoint of the run")
    assert staying["wait-000001"].startswith("wait-000001 may still be running: UNKNOWN")
    assert all((runs / "runs" / job).is_dir() for job in (*going, *staying))


def test_only_a_flag_that_says_so_removes_the_newest_checkpoints(verb, runs: Path) -> None:
    """Even then whatever may still run stays."""
    going, staying = plan(verb, "--older 30d --with-newest-checkpoints")
    assert set(staying) == {"live-000001", "wait-000001"}
    assert len(going) == 11
    assert verb("rm --older 30d --with-newest-checkpoints --yes").code == 0
    left = {folder.name for folder in (runs / "runs").iterdir()}
    assert left == {"live-000001", "wait-000001", "new-000001", "long-000001"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--older 30d --state failed", {"old-000001", "run-000001", "run-000003", "fork-000003"}),
        ("--older 45d --state failed", {"old-000001", "run-000001", "run-000003"}),
        # The newest of those in this state, whatever their age.
        ("--older 30d --state failed --keep 4", {"old-000001", "run-000001"}),
        ("--state failed --keep 2", {"old-000001", "run-000001", "run-000003", "fork-000003"}),
        ("--keep 100", set()),
        ("--older 30d --tag draft", {"run-000001"}),
        ("--older 30d --cluster farm", set()),
    ],
)
def test_rules_are_combined(verb, runs: Path, words: str, expected: set[str]) -> None:
    verb("tag run-000001 new-000001 --add draft")
    assert set(plan(verb, words)[0]) == expected


def test_removing_prints_what_stays_and_why(verb, runs: Path) -> None:
    answer = verb("rm --older 30d --yes --json")
    assert answer.code == 0
    assert {row["job"] for row in json.loads(answer.out) if row["removed"]} == {
        "old-000001",
        "run-000001",
        "run-000003",
        "fork-000003",
        "link-000002",
    }
    assert "one-000001 stays: has the newest verified checkpoint of the run of one-000001: step_20" in answer.said
    assert "2 jobs ended later than that" in answer.said
    assert "warning: run-000001 is continued by run-000002" in answer.said
    again = verb("rm --older 30d --yes --json")
    assert (again.code, json.loads(again.out)) == (0, [])
    assert "nothing to remove" in again.said
    # Where a run can be resumed is what it was.
    dry = verb("rm --tag nothing --dry-run")
    assert (dry.code, "no job matches: none has tags" in dry.said) == (0, True)


def test_it_shows_all_before_it_asks(runs: Path) -> None:
    """On a terminal; the folders are what the answer says."""
    env = {"GPTCTL_HOME": str(runs / "home")}
    for key, code in (("n", 1), ("y", 0)):
        asked = Run(GPTCTL, "rm", "--older", "30d", "--state", "failed", cwd=runs, columns=200, **env)
        asked.read_until("[y/N]")
        asked.press(f"{key}\n".encode())
        assert asked.finish() == code
        assert "run-000002 stays: has the newest verified checkpoint" in asked.text
        assert f"old-000001: {runs}/runs/old-000001, " in asked.text
        assert "remove 4 run folders, " in asked.text
        assert (runs / "runs" / "old-000001").is_dir() == bool(code)
    assert (runs / "runs" / "run-000002").is_dir()


def test_wrong_combinations_are_refused(verb, runs: Path) -> None:
    for words in ("", "old-000001 --older 1d", "old-000001 --with-newest-checkpoints", "--dry-run", "--keep 0"):
        assert verb(f"rm --yes {words}").code == 2, words
    assert verb("rm --older 30d").code == 2  # nobody can answer
    assert verb("rm live-000001 --dry-run").code == 1
    dry = verb("rm one-000001 --dry-run")
    assert (dry.code, "would remove 1 run folder, " in dry.out) == (0, True)
    assert (runs / "runs" / "one-000001").is_dir()
