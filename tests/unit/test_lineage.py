"""The jobs of one run: which jobs a job continues, and where it resumes from. Oracle: the ids, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.jobs.resume import NoCheckpoint, find_resume_point, lineage, whole_lineage
from gptctl.jobs.run_metrics import whole_run
from gptctl.jobs.store import JobRecord, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hosts that know of checkpoints in the run folder, as ssh hosts do; all jobs have ended."""

    def checkpoints(record: JobRecord) -> tuple[str, list[str]]:
        assert record.run_folder.is_dir(), "where the hosts are is written in the run folder"
        return f"/host/{record.id}", [entry.name for entry in Path(record.output_dir).iterdir()]

    monkeypatch.setattr("gptctl.jobs.resume.state_of", lambda record, backends: SimpleNamespace(state="FAILED"))
    return SimpleNamespace(of=lambda kind: SimpleNamespace(checkpoints=checkpoints))


def add(store: Store, name: str, continues: str, *checkpoints: int, steps: tuple[int, ...] = ()) -> JobRecord:
    run = store.folder.parent.parent / "runs" / name
    output = run / "output"
    output.mkdir(parents=True)
    for step in checkpoints:
        (output / f"step_{step}").mkdir()
    rows = [{"event": "train", "step": step, "loss": 1.0, "attempt": 0} for step in steps]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    number = len(store.ids())
    record = JobRecord(
        name, "gpt", 1000.0 + number, "c", "ssh", str(run), str(run / "logs"), 1, 1, 1, continues=continues,
        output_dir=str(output), token=f"t{number}",
    )  # fmt: skip
    assert store.add(record)
    return record


def remove_folder(record: JobRecord) -> None:
    record.run_folder.rename(record.run_folder.with_name(f"removed-{record.id}"))


def test_three_jobs_are_one_run(store: Store) -> None:
    first = add(store, "a-000001", "", 2, steps=(1, 2, 3))
    second = add(store, "a-000002", first.id, 4, steps=(3, 4, 5))
    third = add(store, "a-000003", second.id, steps=(5, 6))
    ids = [first.id, second.id, third.id]
    assert [record.id for record in lineage(third, store)] == ids[::-1]
    for record in (first, second, third):
        assert whole_lineage(record, store) == ids
    rows = whole_run(lineage(third, store))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["job"] for row in rows] == [*[first.id] * 2, *[second.id] * 2, *[third.id] * 2]


def test_records_that_continue_each_other(store: Store) -> None:
    """No gptctl writes such records; whoever edits them gets every job once."""
    first, second = add(store, "a-000001", "a-000003", 2), add(store, "a-000002", "a-000001")
    third, own = add(store, "a-000003", "a-000002"), add(store, "a-000004", "a-000004")
    assert [record.id for record in lineage(second, store)] == ["a-000002", "a-000001", "a-000003"]
    assert sorted(whole_lineage(first, store)) == sorted(whole_lineage(third, store)) == [first.id, second.id, third.id]
    assert whole_lineage(own, store) == [own.id]


def test_a_damaged_record_ends_a_lineage(store: Store) -> None:
    first = add(store, "a-000001", "")
    second = add(store, "a-000002", first.id)
    (store.folder / f"{first.id}.json").write_text("{")
    assert [record.id for record in lineage(second, store)] == [second.id]
    assert whole_lineage(second, store) == [second.id]


def test_the_newest_checkpoint_of_a_run(store: Store, backends: Any) -> None:
    """The last job saved none, so that of the one before counts; removed jobs have none, and nobody asks their hosts."""
    first = add(store, "a-000001", "", 2)
    second = add(store, "a-000002", first.id, 3, 4)
    third = add(store, "a-000003", second.id)
    point = find_resume_point(third, store, backends)
    assert (point.record.id, point.folder, point.step) == (second.id, f"/host/{second.id}", 4)
    remove_folder(first)
    assert find_resume_point(third, store, backends) == point
    assert find_resume_point(second, store, backends) == point
    remove_folder(second)
    with pytest.raises(NoCheckpoint) as error:
        find_resume_point(third, store, backends)
    assert error.value.message == f"no checkpoint of {third.id} in /host/{third.id}"
    assert error.value.hint == f"start it again: gptctl rerun {third.id}"
