"""The jobs of one run: which jobs a job continues, and where it resumes from. Oracle: the ids, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.jobs.report import lineage_facts, lineage_pairs
from gptctl.jobs.resume import (
    Difference,
    NoCheckpoint,
    find_resume_point,
    lineage,
    resume_notes,
    whole_lineage,
)
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
        assert whole_lineage(record, store) == (ids, [])
    rows = whole_run(lineage(third, store))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["job"] for row in rows] == [*[first.id] * 2, *[second.id] * 2, *[third.id] * 2]


def test_records_that_continue_each_other(store: Store) -> None:
    """No gptctl writes such records; whoever edits them gets every job once."""
    first, second = add(store, "a-000001", "a-000003", 2), add(store, "a-000002", "a-000001")
    third, own = add(store, "a-000003", "a-000002"), add(store, "a-000004", "a-000004")
    assert [record.id for record in lineage(second, store)] == ["a-000002", "a-000001", "a-000003"]
    for record in (first, third):
        assert sorted(whole_lineage(record, store).line) == [first.id, second.id, third.id]
    assert whole_lineage(own, store) == ([own.id], [])


def test_a_damaged_record_ends_a_lineage(store: Store) -> None:
    first = add(store, "a-000001", "")
    second = add(store, "a-000002", first.id)
    (store.folder / f"{first.id}.json").write_text("{")
    assert [record.id for record in lineage(second, store)] == [second.id]
    assert whole_lineage(second, store) == ([second.id], [])


def test_arrows_only_where_a_job_continues_the_one_before(store: Store) -> None:
    """a was continued by b and c, and b by d: from each job, one line and the rest as branches."""
    a, b = add(store, "a-000001", ""), add(store, "a-000002", "a-000001")
    c, d = add(store, "a-000003", "a-000001"), add(store, "a-000004", "a-000002")
    of_a, of_c = whole_lineage(a, store), whole_lineage(c, store)
    assert of_a == ([a.id], [(b.id, a.id), (c.id, a.id), (d.id, b.id)])
    assert of_c == ([a.id, c.id], [(b.id, a.id), (d.id, b.id)])
    assert whole_lineage(b, store) == whole_lineage(d, store) == ([a.id, b.id, d.id], [(c.id, a.id)])
    facts = lineage_facts(of_c)
    assert facts["branches"][0] == {"job": b.id, "continues": a.id}
    others = f"{b.id} (from {a.id}), {d.id} (from {b.id})"
    assert lineage_pairs(facts) == [("lineage", f"{a.id} → {c.id}"), ("also continued by", others)]
    assert lineage_pairs(lineage_facts(of_a))[0] == ("lineage", "")
    assert lineage_pairs(lineage_facts(of_a))[1][0] == "continued by"


def test_the_newest_checkpoint_of_a_run(store: Store, backends: Any) -> None:
    """The last job saved none, so that of the one before counts; removed jobs have none, and nobody asks their hosts."""
    first = add(store, "a-000001", "", 2)
    second = add(store, "a-000002", first.id, 3, 4)
    third = add(store, "a-000003", second.id)
    point = find_resume_point(third, store, backends)
    found = (second.id, f"/host/{second.id}", 4)
    assert point[:4] == (second, *found[1:], third)
    assert point.skipped == (f"{third.id} saved no checkpoint",)
    own = find_resume_point(second, store, backends)
    assert (own.record.id, own.folder, own.step, own.skipped) == (*found, ())
    remove_folder(first)
    assert find_resume_point(third, store, backends) == point
    assert find_resume_point(second, store, backends) == own
    remove_folder(second)
    with pytest.raises(NoCheckpoint) as error:
        find_resume_point(third, store, backends)
    removed = [f"the folder of {job.id} was removed" for job in (second, first)]
    assert error.value.message == "; ".join([f"no checkpoint of {third.id} in /host/{third.id}", *removed])
    assert error.value.hint == f"start it again from step 0: gptctl rerun {third.id}"


def test_the_notes_name_what_was_skipped(store: Store, backends: Any) -> None:
    first, second = add(store, "a-000001", "", 2), add(store, "a-000002", "a-000001")
    third = add(store, "a-000003", second.id)
    remove_folder(second)
    point = find_resume_point(third, store, backends)
    assert resume_notes(point, [Difference("Global.seed", 1, 2)]) == [
        f"{third.id} saved no checkpoint",
        f"the folder of {second.id} was removed",
        f"continues {first.id} from step 2, with 1 difference from {third.id}:",
        "  Global.seed: 1 → 2",
    ]
    assert resume_notes(point, [])[-1] == f"continues {first.id} from step 2, with the config of {third.id}"
