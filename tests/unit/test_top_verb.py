"""The verb `top` in a pipe. Oracles: `list --json`, and what the records of the made-up jobs say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gptctl.cli.top import moment_of
from tests.job_records import add_job
from tests.unit.conftest import Answer
from trainer.errors import UserError


def test_one_snapshot_of_all_jobs(tmp_path: Path, verb: Callable[..., Answer]) -> None:
    add_job(tmp_path, "gpt-111111", loss=2.5)
    add_job(tmp_path, "gpt-222222", "FAILED")
    plain = verb("top")
    assert plain.code == 0
    lines = plain.out.splitlines()
    assert lines[0].startswith("gptctl top  2 jobs: 1 failed, 1 completed")
    assert [line.split()[:2] for line in lines[2:]] == [["gpt-222222", "FAILED"], ["gpt-111111", "COMPLETED"]]
    assert "\x1b" not in plain.out
    shown = json.loads(verb("top --json").out)
    listed = {row["job"]: row for row in json.loads(verb("list --json").out)}
    for job in shown["jobs"]:
        assert job["state"] == listed[job["job"]]["state"]
        assert job["loss"] == (listed[job["job"]]["progress"] or {}).get("loss")
    assert shown["detail"] is None


def test_one_snapshot_of_a_job(tmp_path: Path, verb: Callable[..., Answer]) -> None:
    add_job(tmp_path, "gpt-111111", loss=2.5)
    out = verb("top 111111").out
    assert "COMPLETED" in out
    assert "events" in out
    shown = json.loads(verb("top gpt-111111 --json").out)
    assert shown["detail"]["summary"]["job"] == "gpt-111111"
    assert shown["detail"]["loss"] == {"steps": [1, 2], "values": [2.5, 2.5]}
    assert verb("top gpt-nothere").code == 2


def test_as_it_was(tmp_path: Path, verb: Callable[..., Answer]) -> None:
    add_job(tmp_path, "gpt-old", days=3.0, ran=86_400.0)
    add_job(tmp_path, "gpt-new", days=1.0)
    states = {
        at: {job["job"]: job["state"] for job in json.loads(verb("top --json --at", at).out)["jobs"]}
        for at in ("4d", "60h", "2d", "1h")
    }
    assert states["4d"] == {}
    assert states["60h"] == {"gpt-old": "RUNNING"}
    assert states["2d"] == {"gpt-old": "COMPLETED"}
    assert states["1h"] == {"gpt-old": "COMPLETED", "gpt-new": "COMPLETED"}
    assert verb("top --at nonsense").code == 2
    assert verb("top --at", "2999-01-01").code == 2


def test_times() -> None:
    now = time.time()
    assert moment_of("2h ago") == pytest.approx(now - 7200, abs=5)
    assert moment_of("2h") == pytest.approx(now - 7200, abs=5)
    assert 0 <= now - moment_of("07:30") <= 86_400 + 5
    with pytest.raises(UserError, match="--at"):
        moment_of("soon")
