"""The jobs of one run: which jobs a job continues, and where it resumes from. Oracle: the ids, written by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.jobs.config_differences import Difference
from gptctl.jobs.first_job import first_job
from gptctl.jobs.job_status import lineage_facts, lineage_pairs
from gptctl.jobs.remove import continued_by
from gptctl.jobs.resume import (
    NoCheckpoint,
    find_resume_point,
    lineage,
    resume_notes,
    whole_lineage,
)
from gptctl.jobs.run_metrics import removed_steps, whole_run
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.training_progress import progress_of, trainer_status
from gptctl.logs.metric_rows import metric_table
from tests.conftest import save_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hosts that know of checkpoints in the run folder, as ssh hosts do; all jobs have ended."""

    def checkpoints(record: JobRecord) -> tuple[str, list[str]]:
        assert record.run_folder.is_dir(), "where the hosts are is written in the run folder"
        return f"/host/{record.id}", [entry.name for entry in Path(record.output_dir).iterdir()]

    for module in ("resume", "first_job"):
        monkeypatch.setattr(f"gptctl.jobs.{module}.state_of", lambda record, backends: SimpleNamespace(state="FAILED"))
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
    assert f"{first.id}.json is damaged" in store.damaged[0]
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


def test_trackers_name_a_run_by_its_first_job(store: Store, backends: Any) -> None:
    """a, b and c are one run. d and e resume a, which b has continued already: a branch of its own, and what follows it."""

    def resumed(name: str, asked: str, *checkpoints: int, steps: tuple[int, ...] = ()) -> str:
        point = find_resume_point(store.find(asked), store, backends)
        found = first_job(point, store, backends)
        record = add(store, name, point.record.id, *checkpoints, steps=steps)
        (record.run_folder / "plan.json").write_text(json.dumps({"first_job": found}))
        return found

    a = add(store, "a-000001", "", 2, steps=(1, 2, 3))
    assert resumed("b-000001", a.id) == a.id  # it fails at once, so the next one has its place
    assert resumed("b-000002", a.id, steps=(3, 4)) == a.id  # without a checkpoint
    assert resumed("b-000003", "b-000002", 6, steps=(3, 4, 5, 6, 7)) == a.id  # continues a in its place
    assert resumed("c-000001", "b-000003", 8, steps=(7, 8)) == a.id
    assert resumed("d-000001", a.id, 4, steps=(3, 4)) == ""
    assert resumed("e-000001", "d-000001") == "d-000001"
    remove_folder(store.find("c-000001"))
    assert resumed("c-000002", "c-000001") == a.id  # in its place: nothing is left of it


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


def test_the_steps_of_a_removed_job_are_named(store: Store) -> None:
    """Steps 4 to 7 were trained by two removed jobs. The next one logged its first step at 8."""
    first = add(store, "a-000001", "", steps=(1, 2, 3))
    second, third = add(store, "a-000002", first.id, steps=(4, 5)), add(store, "a-000003", "a-000002", steps=(6, 7))
    last = add(store, "a-000004", third.id, steps=(8, 9))
    jobs = lineage(last, store)
    assert removed_steps(jobs, whole_run(jobs)) == []
    remove_folder(second)
    assert removed_steps(jobs, whole_run(jobs)) == [f"steps 4-5: the folder of {second.id} was removed"]
    remove_folder(third)
    both = f"the folders of {second.id}, {third.id} were removed"
    assert removed_steps(jobs, whole_run(jobs)) == [f"steps 4-7: {both}"]
    remove_folder(first)
    assert removed_steps(jobs, whole_run(jobs))[0].startswith("steps 1-7: the folders of a-000001, ")


def test_a_removed_job_that_was_trained_again_left_no_hole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job has all steps from 1 on, whatever the history of the removed one says."""
    monkeypatch.setattr("gptctl.jobs.run_metrics._kept_step", lambda record: 3)
    first = add(store, "a-000001", "")
    jobs = lineage(add(store, "a-000002", first.id, steps=(1, 2)), store)
    remove_folder(first)
    assert removed_steps(jobs, whole_run(jobs)) == []


def test_who_continues_a_job_that_is_removed(store: Store) -> None:
    """Jobs that resumed it, and those of a chain, which train in its folder."""
    first = add(store, "a-000001", "")
    second = add(store, "a-000002", first.id)
    third = add(store, "a-000003", second.id)
    where = {"local_dir": str(third.run_folder.with_name("a-000004")), "output_dir": first.output_dir}
    other = third._replace(id="a-000004", continues="", token="t9", **where)
    assert store.add(other)
    known = store.records()
    assert continued_by([first, second, third], known) == {
        first.id: [second.id, other.id],
        second.id: [third.id],
        third.id: [],
    }
    remove_folder(second)
    assert continued_by([second], known) == {}


def test_jobs_of_a_chain_keep_their_own_history(store: Store) -> None:
    """Three jobs write to one metrics.jsonl and status.json. Each still has its own last step."""
    first = add(store, "a-000001", "")
    file = Path(first.output_dir, "metrics.jsonl")
    jobs = [first._replace(id=f"a-000001-{number}") for number in range(3)]
    lines = [
        {"step": step, "max_steps": 40_000, "loss": step / 10, "step_time": 1.0, "job": job.id, "attempt": 0}
        for job, steps in zip(jobs, (range(1, 10), range(5, 20_000), range(20_000, 20_100)))
        for step in steps
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file.with_name("status.json").write_text(json.dumps({"state": "stopped", "step": 20_105, "job": jobs[2].id}))
    assert [progress_of(job, is_over=True).step for job in jobs] == [9, 19_999, 20_105]
    assert [progress_of(job, is_over=True).loss for job in jobs] == [0.9, 1999.9, 2009.9]
    assert [trainer_status(job) is None for job in jobs] == [True, True, False]
    unknown = first._replace(id="a-000009")
    assert progress_of(unknown, is_over=True) is None


def test_the_job_column_names_other_jobs() -> None:
    rows = [{"job": "a-1", "attempt": 0, "step": 3, "loss": 1.0}]
    assert metric_table(rows, "a-1")[0][0] == "step"
    assert metric_table(rows, "a-3")[0][0] == "job"


def test_what_is_not_a_checkpoint_is_ignored(store: Store, backends: Any, tmp_path: Path) -> None:
    """In a folder that this machine sees. Oracle: the trainer's rule, a folder with a manifest, which is a file."""
    record = add(store, "a-000001", "", 60)  # an empty folder
    output = Path(record.output_dir)
    seen = SimpleNamespace(checkpoints=lambda record: (record.output_dir, os.listdir(record.output_dir)))
    local = SimpleNamespace(of=lambda kind: seen)
    (output / "step_70").write_text("a file")
    for step, make in ((80, Path.mkdir), (90, os.mkfifo), (91, lambda place: place.symlink_to("nowhere"))):
        (output / f"step_{step}").mkdir()
        make(output / f"step_{step}" / "manifest.json")
    with pytest.raises(NoCheckpoint, match="no checkpoint of a-000001"):
        find_resume_point(record, store, local)
    save_checkpoint(output, 50)
    assert find_resume_point(record, store, local).step == 50
    # What other machines have cannot be seen from here.
    assert find_resume_point(record, store, backends).step == 91
