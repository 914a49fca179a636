"""Prepare a job again from the folder of its first run: as it was, varied, or resumed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.backends import Backends
from gptctl.engine.file_reading import read_json
from gptctl.engine.launch_plan import StartConditions
from gptctl.engine.typed_fields import fits
from gptctl.jobs.history import missing_folder
from gptctl.jobs.resume import (
    CKPT_DIR,
    LOAD_OPTIMIZER,
    RESUME_OF,
    find_resume_point,
    lineage,
    rerun_notes,
)
from gptctl.jobs.store import JobRecord, Store
from gptctl.jobs.submit import START_AT_ONCE, Prepared, differences_from, prepare, this_site
from gptctl.jobs.written_config import Written, node_at, read_written, with_absolute_paths, without
from gptctl.planning.build import Site
from gptctl.planning.user_templates import UserTemplate, frozen_templates
from gptctl.spec.check import Checked, check_config, check_tree
from gptctl.spec.cluster_kinds import KINDS
from trainer.config import Override
from trainer.config.layers import with_overrides
from trainer.config.tree import Map, Scalar
from trainer.errors import OUT_OF_REACH, Finding, UserError

OUTPUT_DIR, CLUSTER = "Engine.save_load.output_dir", "Launch.cluster"
ENTRYPOINT = "Launch.entrypoint"
# Options of sbatch that name jobs of that time: Slurm would reject them, or wait for nothing.
OUTDATED = ("Launch.slurm.extra.dependency", "Launch.slurm.extra.kill-on-invalid-dep")


class Changes(NamedTuple):
    """How the new job differs from the first one."""

    overrides: Sequence[Override] = ()
    resume: bool = False  # continue from its newest checkpoint
    current_code: bool = False  # use the trainer or script as it is now, not as it was
    templates: Sequence[UserTemplate] = ()  # in front of the job's own


def prepare_rerun(
    record: JobRecord,
    store: Store,
    backends: Backends,
    changes: Changes,
    conditions: Callable[[Checked], StartConditions] = lambda checked: START_AT_ONCE,
) -> Prepared:
    """Prepare the job of a record again, with its own code, config, profile and templates."""
    # The user's own files may have changed: everything is read from the job's folder.
    before = _frozen_plan(record)
    written = read_written(record.run_folder)
    site = _site(record, before, written, changes.current_code)
    point = find_resume_point(record, store, backends) if changes.resume else None
    overrides = _without_own_script(changes, before)
    is_other_code = any(override.key == ENTRYPOINT for override in overrides)
    kept = [
        *_output_folder(written, changes.resume),
        *([] if changes.current_code or is_other_code else _frozen_code(record, before)),
        *(point.overrides if point else []),
    ]
    was_resumed = not changes.resume and _was_resumed(record)
    if was_resumed:
        written, started = _from_step_0(written, lineage(record, store)[-1])
        kept += started
    checked = _without_own_files(_check(record, written, kept, overrides), record.run_folder)
    # Without changes it is the same job, so it gets the same id with the next number.
    is_same = not (changes.overrides or changes.resume or changes.current_code or was_resumed)
    base = re.sub(r"(-[0-9a-f]{6})-\d+$", r"\1", record.id) if is_same else ""
    templates = [*changes.templates, *frozen_templates(record.run_folder / "templates")]
    prepared = prepare(
        checked,
        store,
        backends,
        site,
        changes.overrides,
        templates,
        base,
        conditions=conditions(checked),
        resumes=point,
    )
    prepared = prepared._replace(rerun_of=record.id)
    if not point:
        notes = rerun_notes(record, _start(prepared), differences_from(record, prepared))
        prepared = prepared._replace(notes=(*notes, *prepared.notes))
    # A run of a sweep that is resumed as it was is still this run.
    if point and not changes.overrides:
        prepared = prepared._replace(sweep=record.sweep, sweep_index=record.sweep_index)
    if changes.current_code:
        return prepared
    # The code is that of the first run, so the state of git is too.
    return prepared._replace(git=read_json(record.run_folder / "git.json") or {})


def _site(
    record: JobRecord, before: Mapping[str, Any], written: Written | None, current_code: bool
) -> Site:
    """Where the first job was submitted, with its interpreter and its code."""
    traits, python = KINDS.get(record.kind), before.get("submit_python") or before["python"]
    # Interpreters of other machines, or found by PATH, cannot be checked from here.
    is_here = traits is not None and traits.is_one_machine and os.path.isabs(python)
    if is_here and not os.access(python, os.X_OK):
        raise UserError(
            f"the interpreter of {record.id} is missing: {python}", "submit its config again"
        )
    code = record.run_folder / "code"
    own = str(code / "trainer" if record.output_dir else code)
    trainer = this_site().trainer if current_code else own
    return Site(written.folder if written else before["work_dir"], python, trainer)


def _output_folder(written: Written | None, resume: bool) -> list[Override]:
    """Give a rerun a folder of its own: it must not overwrite the first run's checkpoints."""
    if resume or (written and node_at(written.tree, OUTPUT_DIR) is None):
        return []
    return [Override(OUTPUT_DIR, "", "a folder of its own")]


def _without_own_script(changes: Changes, before: Mapping[str, Any]) -> list[Override]:
    """The overrides, without one that names the job's own script: its frozen copy is used."""
    return [
        override
        for override in changes.overrides
        if changes.current_code
        or override.key != ENTRYPOINT
        or os.path.basename(str(override.value)) != _script(before)
    ]


def _script(before: Mapping[str, Any]) -> str:
    """The file name of the job's script. Jobs of a module or of the trainer have none."""
    name = os.path.basename(before["program"][1])
    return "" if name.startswith("-") else name


def _frozen_code(record: JobRecord, before: Mapping[str, Any]) -> list[Override]:
    """Take a program and its files from the job's folder: gptctl copied all of them into one."""
    if record.output_dir:  # the bundled trainer, see `_site`
        return []
    code, origin, script = record.run_folder / "code", "the job's own code", _script(before)
    files = sorted(entry for entry in os.listdir(code) if entry not in (script, "rank_log.py"))
    kept = [Override("Launch.files", tuple(str(code / file) for file in files), origin)]
    # A module keeps its name: it is found among these files.
    if script:
        kept.append(Override(ENTRYPOINT, str(code / script), origin, verbatim=True))
    return kept


def _check(
    record: JobRecord,
    written: Written | None,
    kept: Sequence[Override],
    overrides: Sequence[Override],
) -> Checked:
    """Check what was written with these changes; derived values are derived again."""
    folder = record.run_folder
    # The profile as it was: the one of that name may have changed since.
    own_profile = folder / "cluster.json"
    if written is None:
        profile = Override(CLUSTER, str(own_profile), "the job's own profile", verbatim=True)
        checked = check_config(folder / "config.json", [profile, *kept, *overrides])
        return _with_first_origins(checked, folder)
    found: list[Finding] = []
    tree = with_overrides(_without_outdated(written.tree), [*kept, *overrides], found)
    sources = {override.source for override in overrides}
    tree = with_absolute_paths(tree, sources, this_site().folder)
    is_moved = any(override.key == CLUSTER for override in overrides)
    path = Path(record.config) if record.config else None
    return check_tree(path, tree, found, None if is_moved else own_profile)


def _without_own_files(checked: Checked, folder: Path) -> Checked:
    """What the job has frozen was trusted when it was new."""
    others = [each for each in checked.sources if not Path(each.file.path).is_relative_to(folder)]
    return checked._replace(sources=tuple(others))


def _was_resumed(record: JobRecord) -> bool:
    """Whether gptctl itself chose the checkpoint of the job. One that the user wrote stays."""
    origins = (read_json(record.run_folder / "config.json") or {}).get("origins")
    origin = origins.get(CKPT_DIR) if isinstance(origins, dict) else None
    return str(origin).startswith(RESUME_OF)


def _from_step_0(
    written: Written | None, first: JobRecord
) -> tuple[Written | None, list[Override]]:
    """Drop the checkpoint: a rerun starts where the first job of the run began."""
    if written is None:
        return None, [Override(CKPT_DIR, "", "from step 0")]
    tree = without(without(written.tree, CKPT_DIR), LOAD_OPTIMIZER)
    return written._replace(tree=tree), _first_weights(first)


def _first_weights(first: JobRecord) -> list[Override]:
    """The weights that the user of the first job had it start with: a fine-tuning needs them."""
    written = read_written(first.run_folder)
    nodes = {
        key: node_at(written.tree, key) for key in (CKPT_DIR, LOAD_OPTIMIZER) if written is not None
    }
    return [
        Override(key, node.text, str(node.place), verbatim=True)
        for key, node in nodes.items()
        if isinstance(node, Scalar) and not str(node.place).startswith(RESUME_OF)
    ]


def _start(prepared: Prepared) -> str:
    """Where a rerun starts, in words. Scripts know it themselves."""
    checked = prepared.checked
    if checked.launch.entrypoint != "trainer" or prepared.notes or checked.resolved is None:
        return ""
    if folder := checked.inputs.get(CKPT_DIR):
        origin = checked.resolved.origins.get(CKPT_DIR, "")
        return f" from the checkpoint in {folder} ({origin})"
    return " from step 0"


def _without_outdated(tree: Map) -> Map:
    """Remove dependencies on other jobs that were typed; those in a config file stay."""
    for key in OUTDATED:
        node = node_at(tree, key)
        # Only a file has line numbers.
        if node is not None and not node.place.line:
            tree = without(tree, key)
    return tree


def _frozen_plan(record: JobRecord) -> dict[str, Any]:
    """Read the job's plan; raise UserError if it or another part of the folder is missing."""
    folder, again = record.run_folder, "submit its config again"
    if not folder.is_dir():
        raise missing_folder(record, f"{again}{f': {record.config}' if record.config else ''}")
    before = _valid_plan(read_json(folder / "plan.json") or {})
    if before and (folder / "code" / "rank_log.py").is_file():
        return before
    missing = folder / ("code" if before else "plan.json")
    raise UserError(f"{missing} is missing or damaged", again, OUT_OF_REACH)


def _with_first_origins(checked: Checked, folder: Path) -> Checked:
    """Give each value of a config that an older gptctl froze the origin of the first run."""
    config = str(folder / "config.json")
    frozen = read_json(folder / "config.json") or {}
    is_valid = fits(frozen.get("origins"), Mapping[str, str])
    first: Mapping[str, str] = frozen["origins"] if is_valid else {}

    def before(origins: Mapping[str, str]) -> dict[str, str]:
        return {
            key: first.get(key, origin) if origin.startswith(config) else origin
            for key, origin in origins.items()
        }

    resolved = checked.resolved and checked.resolved._replace(
        origins=before(checked.resolved.origins)
    )
    return checked._replace(resolved=resolved, launch_origins=before(checked.launch_origins))


def _valid_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan, or an empty one if a part is damaged that a rerun needs."""
    words = plan.get("program")
    program = words if isinstance(words, list) and len(words) > 1 else [None]
    texts = (plan.get("python"), plan.get("work_dir"), plan.get("submit_python") or "", *program)
    return plan if all(isinstance(text, str) for text in texts) else {}
