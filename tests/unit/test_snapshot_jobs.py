"""Jobs that share minGPT's snapshot, and jobs that run again. Nothing is started.

Oracles: the snapshot that the trainer's own function wrote, and the configs, written by hand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gptctl.backends import Backends, JobState
from gptctl.cli.remove import described
from gptctl.engine.launch_plan import StartConditions
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.remove import remove, removed_before
from gptctl.jobs.rerun import Changes, prepare_rerun
from gptctl.jobs.resume import CKPT_DIR, NoCheckpoint, find_resume_point, resume_notes
from gptctl.jobs.snapshots import Snapshot, read_snapshot
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.submit import START_AT_ONCE, Prepared, freeze_job, prepare, this_site
from gptctl.jobs.submit import add_record as record_job
from gptctl.spec.check import check_config
from gptctl.text import clock_time
from tests.conftest import save_checkpoint
from trainer.checkpoint.snapshot import load_snapshot, save_snapshot
from trainer.config import Override
from trainer.errors import UserError
from trainer.slices import whole

CONFIG = """
Global: {device: cpu, local_batch_size: 8, micro_batch_size: 8}
Engine: {run_mode: epoch, num_train_epochs: 10, max_steps: 0, save_load: {snapshot_path: snap.pt}}
Model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, vocab_size: 64}
Data: {Train: {dataset: {name: CharDataset, path: builtin, max_seq_len: 16}}}
Launch: {gpus_per_node: 1}
"""
SNAPSHOT = "Engine.save_load.snapshot_path"
EPOCHS = "Engine.num_train_epochs"


class Desk:
    """A folder with a config, and jobs that are recorded and frozen, but never started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.backends = folder, Store(), Backends(print)
        (folder / "run.yaml").write_text(CONFIG)

    def prepare(self, *overrides: str, conditions: StartConditions = START_AT_ONCE) -> Prepared:
        typed = [Override.parse(text) for text in overrides]
        checked = check_config(self.folder / "run.yaml", typed)
        return prepare(checked, self.store, self.backends, this_site(), typed, conditions=conditions)

    def rerun(self, record: JobRecord, *overrides: str, resume: bool = False) -> Prepared:
        changes = Changes([Override.parse(text) for text in overrides], resume)
        return prepare_rerun(record, self.store, self.backends, changes)

    def add(self, prepared: Prepared, state: str = "FAILED") -> JobRecord:
        prepared, record = record_job(prepared, self.store, self.backends.of("local"))
        freeze_job(prepared, record)
        self.store.accept(record)
        if state:
            (record.run_folder / "result.json").write_text(json.dumps({"state": state, "ended": 2.0}))
        return record

    def save(self, epoch: int, job: str | None, name: str = "snap.pt") -> None:
        weights = whole({f"{kind}.w": torch.zeros(3) for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")})
        facts: dict[str, Any] = {"step": 3 * epoch, "layout": {"dp": 1}}
        save_snapshot(self.folder / name, weights, facts if job is None else {**facts, "job": job}, epoch)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Desk(folder)


def refused(error: pytest.ExceptionInfo[UserError]) -> list[tuple[str, str]]:
    return [(finding.code, finding.key) for finding in error.value.findings if finding.level == "error"]


def test_a_snapshot_is_read_without_torch(desk: Desk) -> None:
    """The oracle is what the trainer loads from the same file; a large epoch has another form in a pickle."""
    for epoch, job in ((4, "gpt-1"), (70_000, "gpt-2"), (300, None)):
        desk.save(epoch, job)
        file = str(desk.folder / "snap.pt")
        assert read_snapshot(file) == Snapshot(file, epoch, 3 * epoch, job or "")
        weights = whole({f"{kind}.w": torch.ones(3) for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")})
        facts, finished = load_snapshot(Path(file), weights, lambda facts: None)
        assert (facts["step"], facts.get("job"), finished) == (3 * epoch, job, epoch)
    for content in (b"", b"PK", Path(file).read_bytes()[:-30]):
        (desk.folder / "bad.pt").write_bytes(content)
        assert read_snapshot(str(desk.folder / "bad.pt")) is None
    torch.save({"facts": 3, "finished_epoch": "x"}, desk.folder / "bad.pt")
    assert read_snapshot(str(desk.folder / "bad.pt")) is None
    assert read_snapshot(str(desk.folder)) is None


def test_resume_refuses_the_snapshot_of_another_run(desk: Desk) -> None:
    first, second = desk.add(desk.prepare()), desk.add(desk.prepare())
    with pytest.raises(NoCheckpoint, match="does not exist"):
        desk.rerun(first, resume=True)
    desk.save(4, second.id)
    with pytest.raises(UserError) as error:
        desk.rerun(first, resume=True)
    assert refused(error) == [("S018", SNAPSHOT)]
    finding = error.value.findings[-1]
    assert second.id in finding.message
    assert "epoch 4 (step 12)" in finding.message
    assert f"gptctl resume {second.id}" in finding.hint
    resumed = desk.rerun(second, resume=True)
    assert resumed.continues == second.id
    assert resumed.notes == (f"continues {second.id} from the snapshot of epoch 4 (step 12), with the same config",)
    # A job that failed before it saved continues what it had loaded itself.
    third = desk.add(resumed)
    again = desk.rerun(third, resume=True)
    assert (again.continues, again.notes[0]) == (second.id, f"{third.id} saved no snapshot")
    desk.save(2, second.id, "other.pt")
    assert desk.rerun(second, f"{SNAPSHOT}=other.pt", resume=True).continues == second.id
    for other in ("", "missing.pt"):
        with pytest.raises(UserError) as error:
            desk.rerun(second, f"{SNAPSHOT}={other}", resume=True)
        assert refused(error) == [("S018", SNAPSHOT)]


def test_a_script_cannot_take_the_place_of_a_trainer_that_is_resumed(desk: Desk) -> None:
    """It would not load the checkpoint. A rerun may use it."""
    first = desk.add(desk.prepare(f"{SNAPSHOT}="))
    save_checkpoint(Path(first.output_dir), 6)
    (desk.folder / "x.py").touch()
    with pytest.raises(UserError, match=r"^gptctl cannot resume .*x\.py$"):
        desk.rerun(first, "Launch.entrypoint=x.py", resume=True)
    assert desk.rerun(first, "Launch.entrypoint=x.py").continues == ""


def test_an_older_snapshot_does_not_say_who_wrote_it(desk: Desk) -> None:
    """The job logged its last step as 6: a snapshot of step 12 may be another run's, one of step 6 is its own."""
    record = desk.add(desk.prepare())
    Path(record.output_dir).mkdir(parents=True)
    Path(record.output_dir, "metrics.jsonl").write_text(json.dumps({"step": 6, "loss": 1.0, "job": record.id}) + "\n")
    for epoch, expected in ((4, ["S018"]), (2, [])):
        desk.save(epoch, None)
        found = desk.rerun(record, resume=True).findings
        assert [(each.code, each.level) for each in found if each.code == "S018"] == [
            (code, "warning") for code in expected
        ]


def test_the_snapshot_of_another_machine_is_not_looked_for_here(desk: Desk) -> None:
    """A file here has the same path, and belongs to another job: nothing is said about its epoch."""
    record = desk.add(desk.prepare())._replace(remote_dir="/elsewhere")
    desk.save(4, "other-1")
    point = find_resume_point(record, desk.store, desk.backends)
    assert resume_notes(point, []) == [f"continues {record.id} from its snapshot, with the same config"]


def test_nothing_left_to_train(desk: Desk) -> None:
    record = desk.add(desk.prepare())
    desk.save(10, record.id)
    for resume in (True, False):
        with pytest.raises(UserError) as error:
            desk.rerun(record, resume=resume)
        assert refused(error) == [("S012", EPOCHS)]
        assert desk.rerun(record, f"{EPOCHS}=11", resume=resume).continues == record.id
    with pytest.raises(UserError) as error:
        desk.prepare()
    assert refused(error) == [("S012", EPOCHS)]
    with pytest.raises(UserError) as error:
        desk.prepare("Engine.run_mode=step", "Engine.max_steps=30")
    assert refused(error) == [("S012", "Engine.max_steps")]
    # The job before it in a chain has not run yet when this one is submitted.
    assert not desk.prepare(conditions=StartConditions(continues="/runs/a")).notes


@pytest.mark.parametrize(("epochs", "expected"), [(5, ["S012"]), (6, [])])
def test_no_epochs_left_in_a_checkpoint(desk: Desk, epochs: int, expected: list[str]) -> None:
    """10 epochs are 30 steps, so a checkpoint of step 15 has finished five."""
    record = desk.add(desk.prepare(f"{SNAPSHOT}="))
    save_checkpoint(Path(record.output_dir), 15)
    line = {"step": 15, "max_steps": 30, "loss": 1.0, "step_time": 1.0, "job": record.id}
    Path(record.output_dir, "metrics.jsonl").write_text(json.dumps(line) + "\n")
    try:
        found = desk.rerun(record, f"{EPOCHS}={epochs}", resume=True).findings
    except UserError as error:
        found = error.findings
    assert [each.code for each in found if each.level == "error"] == expected


def test_submit_says_that_it_continues(desk: Desk) -> None:
    record = desk.add(desk.prepare())
    assert not desk.prepare().notes
    desk.save(4, record.id)
    (note,) = desk.prepare().notes
    assert note.startswith(f"continues {record.id} from the snapshot of epoch 4 (step 12) in {desk.folder}/snap.pt;")
    assert desk.prepare().continues == record.id
    notes = desk.rerun(record, f"{EPOCHS}=20").notes
    assert notes == (f"runs {record.id} again, with 1 difference:", f"  {EPOCHS}: 10 → 20", note)
    desk.save(4, "nowhere-1")
    assert (desk.prepare().continues, desk.prepare().notes[0][:23]) == ("", "continues an earlier ru")


def test_two_unfinished_jobs_do_not_share_a_snapshot(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    running = desk.add(desk.prepare(), state="")
    monkeypatch.setattr("gptctl.jobs.shared_outputs.state_of", lambda record, backends: JobState("RUNNING"))
    ended = desk.add(desk.prepare(f"{SNAPSHOT}=own.pt"))
    desk.save(4, ended.id)
    desk.save(4, ended.id, "own.pt")
    for start in (desk.prepare, lambda: desk.rerun(ended, f"{SNAPSHOT}=snap.pt", resume=True)):
        with pytest.raises(UserError) as error:
            start()
        assert refused(error) == [("W003", SNAPSHOT)]
        assert running.id in error.value.findings[-1].message
    after = ({"job": running.id, "when": "any", "run_dir": "x"},)
    second = desk.add(desk.prepare(conditions=StartConditions(after=after)), state="")
    # The third one waits for the second, which waits for the first.
    waits = ({"job": second.id, "when": "any", "run_dir": "x"},)
    assert desk.prepare(conditions=StartConditions(after=waits))
    with pytest.raises(UserError):
        desk.prepare(conditions=StartConditions(after=after))
    RunFolder(second.local_dir).path.joinpath("result.json").write_text('{"state": "FAILED", "ended": 2.0}')
    assert desk.rerun(ended, resume=True)
    RunFolder(running.local_dir).path.joinpath("result.json").write_text('{"state": "FAILED", "ended": 2.0}')
    assert desk.prepare()


def test_a_rerun_starts_from_step_0(desk: Desk) -> None:
    """The checkpoint that gptctl chose for a resume is dropped; one that the user wrote stays, and is said."""
    first = desk.add(desk.prepare(f"{SNAPSHOT}="))
    step = Path(first.output_dir, "step_6")
    save_checkpoint(Path(first.output_dir), 6)
    resumed = desk.add(desk.rerun(first, resume=True))
    for written in ("written.json", ""):
        if not written:  # the folder of an older version
            (resumed.run_folder / "written.json").unlink()
        again = desk.rerun(resumed)
        assert CKPT_DIR not in again.checked.inputs
        assert again.continues == ""
        assert again.notes == (f"runs {resumed.id} again from step 0, with the same config",)
    # Its predecessor is removed: a rerun needs nothing of it.
    step.parent.rename(desk.folder / "gone")
    os.rename(first.local_dir, desk.folder / "gone too")
    assert desk.rerun(resumed).continues == ""
    own = desk.add(desk.prepare(f"{SNAPSHOT}=", f"{CKPT_DIR}={desk.folder}/gone"))
    (note, *_) = desk.rerun(own, "Global.seed=7").notes
    assert note.startswith(f"runs {own.id} again from the checkpoint in {desk.folder}/gone (")


def test_a_removed_job_says_when_it_was_removed(desk: Desk) -> None:
    record = desk.add(desk.prepare())
    moment = remove(record, desk.backends)
    assert removed_before(record) == moment
    for resume in (False, True):
        with pytest.raises(UserError) as error:
            desk.rerun(record, resume=resume)
        assert error.value.message == f"the folder of {record.id} was removed {clock_time(moment)}"
        assert error.value.hint == f"submit its config again: {desk.folder}/run.yaml"
    answer = {"job": record.id, "removed": moment, "already_removed": True, "kept": []}
    assert described(answer) == f"{record.id}: already removed {clock_time(moment)}"
    assert described({**answer, "already_removed": False}) == f"{record.id}: removed"


def test_another_secret_is_a_difference(desk: Desk) -> None:
    """It may be the key of the checkpoints. Oracle: the references, as typed; never the content of a file."""
    (desk.folder / "key").write_text("s3cret" * 8)
    (desk.folder / "other").write_text("0ther" * 8)
    name = "GPTCTL_CHECKPOINT_KEY"
    first = desk.add(desk.prepare(f"Launch.secrets={{{name}: {{file: key}}}}"))
    plain = desk.add(desk.prepare())
    key = f"Launch.secrets={{{name}: {{file: {desk.folder / 'other'}}}}}"
    for record, override, expected in (
        (first, "Launch.secrets=", "{file: key} → none"),
        (first, key, f"{{file: key}} → {{file: {desk.folder / 'other'}}}"),
        (plain, f"Launch.secrets={{{name}: {{env: HOME}}}}", "none → {env: HOME}"),
    ):
        notes = desk.rerun(record, override).notes
        assert notes[1:] == (f"  Launch.secrets.{name}: {expected}",), notes
        assert "1 difference" in notes[0]
    assert not any("Launch.secrets" in note for note in desk.rerun(first).notes)
    desk.save(1, first.id)
    resumed = desk.rerun(first, "Launch.secrets=", resume=True).notes
    assert f"  Launch.secrets.{name}: {{file: key}} → none" in resumed
