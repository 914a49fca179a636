"""Where processes of an ended job may be left. Oracle: what was recorded, and by which version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptctl.backends import Backends
from gptctl.engine.job_result import FAILED, parse_result
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.resume import find_resume_point
from gptctl.jobs.state import may_run, state_of
from gptctl.jobs.store import JobRecord, Store, new_record
from trainer.errors import OUT_OF_REACH, UserError


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    folder = tmp_path / "gpt-1"
    folder.mkdir()
    RunFolder(folder).finish(FAILED, "node 1: its host is lost", not_ended=(1,))
    where = {"local_dir": str(folder), "log_dir": str(folder / "logs"), "output_dir": str(folder / "output")}
    return new_record(
        id="gpt-1", name="gpt", cluster="lab", kind="ssh", token="t", nodes=2, per_node=1, world=2, **where
    )


def silent(text: str) -> None:
    return


def test_hosts_that_may_have_something_are_named_and_block_a_resume(record: JobRecord, tmp_path: Path) -> None:
    folder, backends = RunFolder(record.local_dir), Backends(silent)
    folder.set_not_ended(["node-b", "node-c"])
    reason = state_of(record, backends).reason
    assert reason == "node 1: its host is lost; may still be running on node-b, node-c: gptctl cancel gpt-1"
    assert may_run(record, backends)
    with pytest.raises(UserError, match="gpt-1 may still be running on node-b, node-c") as refused:
        find_resume_point(record, Store(tmp_path / "home"), backends)
    assert refused.value.exit_code == OUT_OF_REACH
    folder.set_not_ended([])
    assert state_of(record, backends).reason == "node 1: its host is lost"
    assert not may_run(record, backends)


def test_hosts_of_a_job_of_an_older_version_are_asked(record: JobRecord) -> None:
    """Its result does not say which of them confirmed their end."""
    file = record.run_folder / "result.json"
    result = json.loads(file.read_text())
    del result["not_ended"]
    file.write_text(json.dumps(result))
    assert may_run(record, Backends(silent))


@pytest.mark.parametrize(
    ("written", "read"),
    [([], ()), ([0, 2], (0, 2)), ([0, -1, "1", True, 1 << 40], (0,)), (None, None), ("12", None), (1, None)],
)
def test_what_a_host_says_of_the_nodes(written: object, read: object) -> None:
    found = parse_result({"state": FAILED, "not_ended": written})
    assert found is not None
    assert found.not_ended == read
