"""Resume from another job's checkpoint: where it is, what differs, and what cannot be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gptctl.backends import Backends
from gptctl.engine.file_reading import read_json
from gptctl.engine.run_folder import checkpoint_steps
from gptctl.jobs.state import is_final, state_of
from gptctl.jobs.store import JobRecord, Store
from gptctl.spec.check import Checked
from gptctl.text import count
from trainer.config import Override
from trainer.config.continuation import model_differences
from trainer.config.sections import RunConfig
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, Finding, Rule, UserError

SAME_MODEL = Rule("S011", "a resumed run must have the model of its checkpoint")
STEPS_LEFT = Rule("S012", "a resumed run must have steps left to train")

SNAPSHOT_PATH = "Engine.save_load.snapshot_path"
CKPT_DIR, MAX_STEPS = "Engine.save_load.ckpt_dir", "Engine.max_steps"
# Differences in these keys are not reported: they change where files go and what is printed.
NOT_REPORTED = ("Launch.", "Engine.save_load.", "Engine.logging_freq", "Profiler.", "Offline_Eval.")


class ResumePoint(NamedTuple):
    """The checkpoints that a job resumes from, and the job that wrote them."""

    record: JobRecord
    folder: str  # as the next job sees it; empty: a snapshot, which the config names itself
    step: int  # of the newest checkpoint; 0 if unknown

    @property
    def overrides(self) -> list[Override]:
        # As an override it is checked, recorded and shown like any other value.
        origin = f"resume of {self.record.id}"
        return [Override(CKPT_DIR, self.folder, origin, verbatim=True)] if self.folder else []


class NoCheckpoint(UserError):
    """Neither the job nor the ones that it continues saved a checkpoint."""


class Difference(NamedTuple):
    """A value of the run that is not the one of the job that it resumes."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.now)}"


def _shown(value: Any) -> str:
    return "(empty)" if value is None else str(value)


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
    if frozen_value(record, SNAPSHOT_PATH):
        return ResumePoint(record, "", 0)
    folder = ""
    # A job that failed before its first checkpoint left none: its predecessor may have one.
    for ancestor in lineage(record, store):
        # Of a removed job nothing is left, and nothing tells where its hosts are.
        if not ancestor.run_folder.is_dir() and not os.path.isdir(ancestor.output_dir):
            continue
        place, names = backends.of(ancestor.kind).checkpoints(ancestor)
        folder = folder or place
        if newest := max(checkpoint_steps(names), default=0):
            return ResumePoint(ancestor, place, newest)
    hint = f"start it again: gptctl rerun {record.id}"
    raise NoCheckpoint(f"no checkpoint of {record.id} in {folder or record.output_dir}", hint)


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


def whole_lineage(record: JobRecord, store: Store) -> list[str]:
    """The jobs of a run, oldest first: those before this job, the job itself, those after it."""
    ids = [job.id for job in reversed(lineage(record, store))]
    # A job that was continued twice has two branches: all of their jobs are named.
    for other in store.records():
        if other.continues in ids and other.id not in ids:
            ids.append(other.id)
    return ids


def check_resume(point: ResumePoint, checked: Checked) -> Iterator[Finding]:
    """Report what the trainer would refuse after the job has waited in a queue."""
    before, now = _resolved(point.record), checked.resolved
    model = before.get("Model")
    # Without the job's config the trainer checks it.
    if now is None or not isinstance(model, Mapping):
        return
    if different := model_differences(model, asdict(now.run.Model)):
        message = f"checkpoint of another model ({point.record.id}): {'; '.join(different)}"
        yield SAME_MODEL.found(
            "Model", None, message, "use the same Model, or submit without --resume"
        )
    yield from _check_steps(point, now.run)


def _check_steps(point: ResumePoint, run: RunConfig) -> Iterator[Finding]:
    # Epochs have no length before the data is read.
    steps = run.Engine.max_steps
    if run.Engine.run_mode == "step" and 0 < steps <= point.step:
        message = f"{point.record.id} has already trained {point.step} of {steps} steps"
        hint = f"use a larger one, such as -o {MAX_STEPS}={2 * point.step}"
        yield STEPS_LEFT.found(MAX_STEPS, steps, message, hint)


def differences(point: ResumePoint, checked: Checked, now: Mapping[str, Any]) -> list[Difference]:
    """Compare the frozen configs of two jobs; the differences that change the training."""
    record, machines = point.record, checked.machines
    found = []
    # Nodes and ranks per node together: people think of the number of ranks.
    if (record.nodes, record.per_node) != machines:
        before = _world(record.nodes, record.per_node)
        found.append(Difference("world", before, _world(machines.nodes, machines.per_node)))
    before_values, now_values = dict(_flat(_resolved(record), "")), dict(_flat(now, ""))
    found += [
        Difference(key, before_values[key], value)
        for key, value in now_values.items()
        # Keys that the older version of gptctl did not have cannot be compared.
        if key in before_values and before_values[key] != value and _is_reported(key)
    ]
    return found


def _is_reported(key: str) -> bool:
    return not key.startswith(NOT_REPORTED)


def _world(nodes: int, per_node: int) -> str:
    return f"{count(nodes * per_node, 'rank')} ({nodes} × {per_node})"


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from _flat(value, full)
        else:
            # Tuples of this process are lists in the file of the other job.
            yield full, list(value) if isinstance(value, tuple) else value


def _resolved(record: JobRecord) -> Mapping[str, Any]:
    """The resolved config of a job; empty if its file is missing or damaged."""
    values = (read_json(record.run_folder / "config.json") or {}).get("resolved")
    return values if isinstance(values, dict) else {}


def frozen_value(record: JobRecord, key: str) -> Any:
    """A value of a job's resolved config; None if it is missing or damaged."""
    value: Any = _resolved(record)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def resume_notes(point: ResumePoint, found: Sequence[Difference]) -> list[str]:
    """What the user should know before the job is submitted."""
    step = f"step {point.step:,}" if point.step else "its snapshot"
    start = f"continues {point.record.id} from {step}"
    if not found:
        return [f"{start}, with the same config"]
    return [f"{start}, with {count(len(found), 'difference')}:", *(f"  {each}" for each in found)]
