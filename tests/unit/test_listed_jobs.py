"""Rows of `gptctl list --all` that are kept from one command to the next. Oracle: the same command without what was kept."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptctl.jobs import listed_jobs
from gptctl.jobs.store import JobRecord
from tests.job_records import add_job
from tests.unit.conftest import Answer

Verb = Callable[..., Answer]
OLD = time.time() - 1000


@pytest.fixture
def jobs(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> dict[str, JobRecord]:
    """Five jobs that have ended long ago, and a list that was kept."""
    monkeypatch.setattr(listed_jobs, "LEAST_NEW", 1)
    records = {name: add_job(tmp_path, name, days=2, loss=2.0) for name in ("a-1", "a-2", "a-3", "a-4")}
    records["s-5"] = add_job(tmp_path, "s-5", days=2, output_dir="")
    make_old(tmp_path)
    listed(verb)
    assert set(kept(tmp_path)) == set(records)
    return records


def make_old(root: Path) -> None:
    for path in [*root.rglob("*")][::-1]:
        os.utime(path, (OLD, OLD), follow_symlinks=False)


def kept(root: Path) -> dict[str, Any]:
    body = (root / "home" / "listed.json").read_bytes().partition(b"\n")[2]
    return {record["id"]: row for record, row, _, _ in json.loads(body)}


def listed(verb: Verb, words: str = "--all") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(verb(f"list {words} --json").out)
    return found


def rows_match(root: Path, verb: Verb) -> dict[str, dict[str, Any]]:
    """The rows, which are the same without the kept ones."""
    found = listed(verb)
    (root / "home" / "listed.json").unlink(missing_ok=True)
    assert found == listed(verb)
    return {row["job"]: row for row in found}


def append_step(record: JobRecord) -> None:
    with open(Path(record.output_dir, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": 9, "loss": 1.5, "step_time": 0.1, "job": record.id}) + "\n")


def test_kept_rows_are_used(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    """With one value changed where they are kept, this value is listed."""
    file = tmp_path / "home" / "listed.json"
    body = file.read_bytes().partition(b"\n")[2].replace(b'"loss":2.0', b'"loss":7.0')
    file.write_bytes(listed_jobs._head(body) + b"\n" + body)
    assert [row["progress"] and row["progress"]["loss"] for row in listed(verb)] == [7.0, 7.0, 7.0, 7.0, None]


def test_a_job_that_logs_again_is_read_again(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    append_step(jobs["a-2"])
    assert rows_match(tmp_path, verb)["a-2"]["progress"]["step"] == 9


def test_a_script_whose_log_arrives_later(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    log = Path(jobs["s-5"].log_dir, "attempt-0", "workerlog.0")
    log.parent.mkdir(parents=True)
    log.write_text(
        "[2026-11-16 04:00:00,446] [    INFO] - global step 7, epoch: 0, batch: 7, loss: 1.820000000, avg_reader_cost: 0.00100 sec, "
        "avg_batch_cost: 0.25000 sec, speed: 4.00 step/s, ips_total: 4096 tokens/s, ips: 2048 tokens/s, learning rate: 5.00000e-05\n"
    )
    assert rows_match(tmp_path, verb)["s-5"]["progress"]["step"] == 7


def test_tags_and_notes(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    assert verb("tag a-3 --add best --note why").code == 0
    assert rows_match(tmp_path, verb)["a-3"]["tags"] == {"best": ""}
    assert [row["job"] for row in listed(verb, "--tag best")] == ["a-3"]


def test_a_folder_that_is_removed(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    assert verb("rm --yes a-1").code == 0
    shutil.rmtree(jobs["a-2"].local_dir)
    rows = rows_match(tmp_path, verb)
    assert rows["a-1"]["removed"]
    assert "run folder removed" in rows["a-2"]["reason"]


def test_a_result_that_is_replaced(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    (jobs["a-4"].run_folder / "result.json").write_text(json.dumps({"state": "FAILED", "reason": "x", "ended": OLD}))
    assert rows_match(tmp_path, verb)["a-4"]["state"] == "FAILED"


def test_a_new_job_of_the_same_id(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    (tmp_path / "home" / "jobs" / "a-1.json").unlink()
    shutil.rmtree(jobs["a-1"].local_dir)
    add_job(tmp_path, "a-1", state="FAILED", cluster="other")
    row = rows_match(tmp_path, verb)["a-1"]
    assert (row["state"], row["cluster"]) == ("FAILED", "other")


@pytest.mark.parametrize("state", ["RUNNING", "UNKNOWN"])
def test_only_jobs_that_have_ended_are_kept(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb, state: str) -> None:
    add_job(tmp_path, "r-6", state=state)
    make_old(tmp_path)
    listed(verb)
    assert "r-6" not in kept(tmp_path)


def test_a_file_that_changed_a_moment_ago_is_not_trusted(
    jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb
) -> None:
    """It could change once more at the same time of the file system."""
    append_step(jobs["a-1"])
    listed(verb)
    assert kept(tmp_path)["a-1"]["progress"]["step"] == 2
    assert rows_match(tmp_path, verb)["a-1"]["progress"]["step"] == 9


@pytest.mark.parametrize("damage", [b"", b"1", b"\x00" * 100, b"1 0.1.0 5\n[]", b"{}\n[[1,2,3,4]]"])
def test_a_damaged_file_is_ignored(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb, damage: bytes) -> None:
    (tmp_path / "home" / "listed.json").write_bytes(damage)
    assert len(rows_match(tmp_path, verb)) == 5


def test_a_flipped_bit_is_noticed(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    file = tmp_path / "home" / "listed.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    rows_match(tmp_path, verb)


def test_another_version_reads_all_again(
    jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_jobs, "FORM", "2")
    assert listed_jobs._load(tmp_path / "home" / "listed.json") == []


def test_filters_and_orders_of_kept_rows(jobs: dict[str, JobRecord], tmp_path: Path, verb: Verb) -> None:
    words = (
        "--state COMPLETED",
        "--since 3d --sort=-name",
        "--sort loss --limit 2",
        "--cluster local --size",
        "--state FAILED",
    )
    found = [verb(f"list {each} --json")[:2] for each in words]
    for each, (code, out) in zip(words, found):
        (tmp_path / "home" / "listed.json").unlink(missing_ok=True)
        assert verb(f"list {each} --json")[:2] == (code, out)
