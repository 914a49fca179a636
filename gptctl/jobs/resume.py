"""Resume from another job's checkpoint: where it is, what differs, and what cannot be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gptctl.backends import Backends
from gptctl.engine.file_reading import open_at_once
from gptctl.engine.run_folder import checkpoint_steps
from gptctl.jobs.config_differences import Difference, resolved_config
from gptctl.jobs.snapshots import SNAPSHOT_PATH, Snapshot, read_snapshot, snapshot_file
from gptctl.jobs.state import is_final, refuse_if_not_ended, state_of
from gptctl.jobs.store import JobRecord, Store
from gptctl.planning.build import Site
from gptctl.spec.check import Checked
from gptctl.text import count
from trainer.checkpoint_names import MANIFEST
from trainer.config import Override
from trainer.config.continuation import model_differences
from trainer.config.sections import RunConfig
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, Finding, Rule, UserError
from trainer.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gptctl.jobs.training_progress import TrainingProgress

SAME_MODEL = Rule("S011", "a resumed run must have the model of its checkpoint")
STEPS_LEFT = Rule("S012", "a run that continues must have steps left to train")
OWN_SNAPSHOT = Rule("S018", "a resumed run must continue the snapshot of its own jobs")

CKPT_DIR, MAX_STEPS = "Engine.save_load.ckpt_dir", "Engine.max_steps"
LOAD_OPTIMIZER = "Engine.save_load.load_optimizer"
EPOCHS = "Engine.num_train_epochs"
RESUME_OF = "resume of "  # the origin of a ckpt_dir that gptctl has set


class ResumePoint(NamedTuple):
    """The checkpoints that a job resumes from, and the job that wrote them."""

    record: JobRecord
    folder: str  # as the next job sees it; empty: a snapshot, which the config names itself
    step: int  # of the newest checkpoint; 0 if unknown
    asked: JobRecord  # the job that was to be resumed; it may have no checkpoint of its own
    skipped: tuple[str, ...] = ()  # the jobs without a checkpoint, and why they have none
    snapshot: str = ""  # its file, instead of a folder
    run: tuple[str, ...] = ()  # the jobs that may have written the snapshot
    found: Snapshot | None = None  # what the snapshot says, if this machine can see it

    @property
    def overrides(self) -> list[Override]:
        # As an override it is checked, recorded and shown like any other value.
        origin = f"{RESUME_OF}{self.record.id}"
        if not self.folder:
            return []
        chosen = [Override(CKPT_DIR, self.folder, origin, verbatim=True)]
        # A fine-tuning started with weights only, but it resumes its own state.
        if frozen_value(self.record, LOAD_OPTIMIZER) is False:
            chosen.append(Override(LOAD_OPTIMIZER, "True", origin))
        return chosen


class NoCheckpoint(UserError):
    """Neither the job nor the ones that it continues saved a checkpoint."""


def find_resume_point(record: JobRecord, store: Store, backends: Backends) -> ResumePoint:
    """Find the newest checkpoint of a job, or of the one that it continued itself."""
    # gptctl does not know what a user's own script saves, or where.
    if not record.output_dir:
        hint = f"only the bundled trainer can resume; to start it again: gptctl rerun {record.id}"
        raise UserError(f"{record.id} did not run the bundled trainer", hint, WRONG_USAGE)
    # Two jobs would train from the same point, and the old one may still write checkpoints.
    if not is_final(state_of(record, backends)):
        hint = f"stop it first: gptctl cancel {record.id}"
        raise UserError(f"{record.id} is still running", hint, ANSWER_IS_NO)
    refuse_if_not_ended(record)
    if snapshot := frozen_value(record, SNAPSHOT_PATH):
        return _snapshot_point(record, store, str(snapshot))
    folder, skipped = "", []
    # A job that failed before its first checkpoint left none: its predecessor may have one.
    for ancestor in lineage(record, store):
        # Of a removed job nothing is left, and nothing tells where its hosts are.
        if not ancestor.run_folder.is_dir() and not os.path.isdir(ancestor.output_dir):
            skipped.append(f"the folder of {ancestor.id} was removed")
            continue
        place, names = backends.of(ancestor.kind).checkpoints(ancestor)
        folder = folder or place
        # On other machines their trainer decides what is a checkpoint.
        if ancestor.remote_dir in ("", ancestor.local_dir) and place == ancestor.output_dir:
            names = [name for name in names if _is_checkpoint(os.path.join(place, name))]
        if newest := max(checkpoint_steps(names), default=0):
            return ResumePoint(ancestor, place, newest, record, tuple(skipped))
        skipped.append(f"{ancestor.id} saved no checkpoint")
    hint = f"start it again from step 0: gptctl rerun {record.id}"
    others = "".join(f"; {each}" for each in skipped[1:])
    raise NoCheckpoint(
        f"no checkpoint of {record.id} in {folder or record.output_dir}{others}", hint
    )


def _is_checkpoint(folder: str) -> bool:
    """Whether the folder has a manifest, as the trainer's checkpoints of all versions have."""
    try:
        os.close(open_at_once(os.path.join(folder, MANIFEST), os.O_RDONLY))
    except OSError:
        return False
    return True


def _snapshot_point(record: JobRecord, store: Store, file: str) -> ResumePoint:
    """Find the job of the run that wrote the snapshot; `check_resume` refuses one of others."""
    jobs = lineage(record, store)
    ids = tuple(job.id for job in jobs)
    # Files of other machines cannot be seen from here: their trainer decides.
    if record.remote_dir not in ("", record.local_dir):
        return ResumePoint(record, "", 0, record, snapshot=file, run=ids)
    if not os.path.exists(file):
        hint = f"start it again from step 0: gptctl rerun {record.id}"
        raise NoCheckpoint(f"no snapshot of {record.id}: {file} does not exist", hint)
    found = read_snapshot(file)
    number = ids.index(found.job) if found and found.job in ids else 0
    skipped = tuple(f"{job} saved no snapshot" for job in ids[:number])
    step = found.step if found else 0
    return ResumePoint(jobs[number], "", step, record, skipped, file, ids, found)


def lineage(record: JobRecord, store: Store) -> list[JobRecord]:
    """The job, the job that it continues, and so on: newest first."""
    found, ids = [record], {record.id}
    while (earlier := found[-1].continues) and earlier not in ids and store.holds(earlier):
        try:
            found.append(store.find(earlier))
        except UserError:  # its record is damaged, which the store reports
            break
        ids.add(earlier)
    return found


class Lineage(NamedTuple):
    """The jobs of a run, seen from one of them."""

    line: list[str]  # oldest first: each continues the one before
    branches: list[tuple[str, str]]  # other jobs, and which one each of them continues


def whole_lineage(record: JobRecord, store: Store) -> Lineage:
    """Follow a run back to its first job, and forward while a job has exactly one successor."""
    line = [job.id for job in reversed(lineage(record, store))]
    continued = [(each.id, each.continues) for each in store.records() if each.continues]
    # A job that was continued twice has no single successor: both are branches.
    while len(after := [job for job, before in continued if before == line[-1]]) == 1:
        if after[0] in line:
            break
        line.append(after[0])
    known, branches = set(line), []
    # Records are sorted by age, so a job comes after the one that it continues.
    for job, before in continued:
        if before in known and job not in known:
            known.add(job)
            branches.append((job, before))
    return Lineage(line, branches)


def check_resume(point: ResumePoint, checked: Checked, site: Site) -> Iterator[Finding]:
    """Report what the trainer would refuse after the job has waited in a queue."""
    # A script after `--` would start from the beginning, whatever the checkpoint says.
    if checked.launch.entrypoint != "trainer":
        hint = "only the bundled trainer can resume; submit the script as a job of its own"
        raise UserError(f"gptctl cannot resume {checked.launch.entrypoint}", hint, WRONG_USAGE)
    before, now = resolved_config(point.record), checked.resolved
    model = before.get("Model")
    # Without the job's config the trainer checks it.
    if now is None or not isinstance(model, Mapping):
        return
    if different := model_differences(model, asdict(now.run.Model)):
        message = f"checkpoint of another model ({point.record.id}): {'; '.join(different)}"
        yield SAME_MODEL.found(
            "Model", None, message, "use the same Model, or submit without --resume"
        )
    if point.snapshot:
        yield from _check_snapshot(point, checked, snapshot_file(checked, site))
    elif point.step and now.run.Engine.save_load.load_optimizer:
        yield from _check_steps(point, now.run)


def _check_snapshot(point: ResumePoint, checked: Checked, file: str) -> Iterator[Finding]:
    """Check that the new job would load the state of the job that it is to continue."""
    if not checked.cluster.sees_files:
        return
    job, found = point.asked.id, read_snapshot(file) if file else None
    other = "/path/to/another.pt"
    if found and found.job and found.job not in point.run:
        message = (
            f"{found.job} wrote it last, at {found}; it is neither {job} nor continued by {job}"
        )
        hint = (
            f"continue that one: gptctl resume {found.job}; or start again with another file: "
            f"gptctl rerun {job} -o {SNAPSHOT_PATH}={other}"
        )
        yield OWN_SNAPSHOT.found(SNAPSHOT_PATH, file, f"{file}: {message}", hint)
    elif file != point.snapshot and not (found and found.job):
        message = f"the state of {job} is in {point.snapshot}"
        hint = f"use -o {SNAPSHOT_PATH}={point.snapshot}"
        yield OWN_SNAPSHOT.found(SNAPSHOT_PATH, file, message, hint)
    elif found and not found.job and (last := _last_step(point.asked)) < found.step:
        message = f"{file} has {found}, but {job} ended at step {last:,}"
        hint = "another run may have written it; the log of the new job says where it starts"
        warning = OWN_SNAPSHOT._replace(level="warning")
        yield warning.found(SNAPSHOT_PATH, file, message, hint)


def _progress(record: JobRecord) -> TrainingProgress | None:
    # Imported here: a submit that resumes nothing would pay for reading logs.
    from gptctl.jobs.training_progress import progress_of

    return progress_of(record, is_over=True)


def _last_step(record: JobRecord) -> int:
    progress = _progress(record)
    return progress.step if progress else 0


def check_snapshot_left(checked: Checked, found: Snapshot) -> Iterator[Finding]:
    """Refuse a job that would find its snapshot complete: it would only write it again."""
    if checked.resolved is None:
        return
    engine = checked.resolved.run.Engine
    if engine.run_mode == "epoch" and found.epoch >= engine.num_train_epochs:
        key, value = EPOCHS, engine.num_train_epochs
    elif 0 < engine.max_steps <= found.step:
        key, value = MAX_STEPS, engine.max_steps
    else:
        return
    message = f"{found.file} is a snapshot of {found}: nothing is left to train"
    hint = (
        f"use a larger one, such as -o {key}={2 * value}; to train from scratch, delete the file "
        f"or set another -o {SNAPSHOT_PATH}=…"
    )
    yield STEPS_LEFT.found(key, value, message, hint)


def _check_steps(point: ResumePoint, run: RunConfig) -> Iterator[Finding]:
    engine = run.Engine
    if engine.run_mode == "epoch":
        yield from _check_epochs(point, run)
    if 0 < engine.max_steps <= point.step:
        message = f"{point.record.id} has already trained {point.step} of {engine.max_steps} steps"
        hint = f"use a larger one, such as -o {MAX_STEPS}={2 * point.step}"
        yield STEPS_LEFT.found(MAX_STEPS, engine.max_steps, message, hint)


def _check_epochs(point: ResumePoint, run: RunConfig) -> Iterator[Finding]:
    """Check the epochs as far as the job's own steps tell how long one is."""
    steps, epochs = steps_per_epoch(point.record), run.Engine.num_train_epochs
    # With another batch an epoch has another number of steps: the trainer knows it.
    is_same = frozen_value(point.record, "Global.global_batch_size") == run.Global.global_batch_size
    if steps and is_same and point.step >= epochs * steps:
        message = f"{point.record.id} has already trained all of {count(epochs, 'epoch')}"
        hint = f"use a larger one, such as -o {EPOCHS}={2 * epochs}"
        yield STEPS_LEFT.found(EPOCHS, epochs, message, hint)


def steps_per_epoch(record: JobRecord) -> int:
    """The length of an epoch, from the job's own metrics; 0 if unknown."""
    progress, epochs = _progress(record), frozen_value(record, EPOCHS)
    limit = frozen_value(record, MAX_STEPS)
    total = (progress.total if progress else None) or 0
    is_cut = isinstance(limit, int) and 0 < limit <= total
    return 0 if is_cut or not isinstance(epochs, int) or epochs < 1 else total // epochs


def frozen_value(record: JobRecord, key: str) -> Any:
    """A value of a job's resolved config; None if it is missing or damaged."""
    value: Any = resolved_config(record)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def resume_notes(point: ResumePoint, found: Sequence[Difference]) -> list[str]:
    """What the user should know before the job is submitted."""
    step = f"step {point.step:,}" if point.step else "its snapshot"
    if point.found:
        step = f"the snapshot of {point.found}"
    # The differences are those from the job that the user named.
    other = f" from {point.asked.id}" if point.skipped else ""
    start = f"continues {point.record.id} from {step}"
    return [*point.skipped, *_with_differences(start, found, other)]


def _with_differences(start: str, found: Sequence[Difference], other: str = "") -> list[str]:
    if not found:
        same = (
            f"with the config of{other.removeprefix(' from')}" if other else "with the same config"
        )
        return [f"{start}, {same}"]
    number = count(len(found), "difference")
    return [f"{start}, with {number}{other}:", *(f"  {each}" for each in found)]


def rerun_notes(record: JobRecord, start: str, found: Sequence[Difference]) -> list[str]:
    """What the user should know before a job runs again."""
    return _with_differences(f"runs {record.id} again{start}", found)
