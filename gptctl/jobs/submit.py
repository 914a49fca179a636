"""The story of one submit: check, plan, render, journal, freeze, start. Until the job exists, all can be undone."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import trainer
from gptctl.backends import Backend, Backends
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import TOKEN
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import is_alive, is_here
from gptctl.engine.run_folder import RunFolder, read_text
from gptctl.jobs.freeze import frozen_config
from gptctl.jobs.preflight import check_surroundings
from gptctl.jobs.store import JobRecord, Store, new_record
from gptctl.planning.build import JobIdentity, Site
from gptctl.planning.render import check_syntax, render
from gptctl.spec.check import Checked
from gptctl.spec.resources import installation_id
from trainer.config import Override
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, Finding, UserError, errors_in


class Prepared(NamedTuple):
    """A job that could be submitted: its plan and the exact text of its scripts."""

    checked: Checked
    site: Site
    plan: LaunchPlan
    scripts: dict[str, str]
    findings: tuple[Finding, ...]
    base_id: str
    templates: tuple[Path, ...]
    git: Mapping[str, Any] | None = None  # None: as it is now


def this_site() -> Site:
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the current folder has been deleted", "go to another one", WRONG_USAGE
        ) from None
    if any(not character.isprintable() for character in folder):
        message = "the name of the current folder has control characters, or is not UTF-8"
        raise UserError(message, "rename it, or go to another one", WRONG_USAGE)
    return Site(folder, sys.executable, os.path.dirname(os.path.abspath(trainer.__file__)))


def prepare(
    checked: Checked,
    store: Store,
    backends: Backends,
    site: Site,
    overrides: Sequence[Override] = (),
    templates: Sequence[Path] = (),
    base: str = "",
) -> Prepared:
    """All that precedes a submission. UserError with every finding if the job would not start."""
    if not checked.is_valid:
        raise UserError(f"{checked.name} is not submitted", findings=checked.findings)
    backend = backends.of(checked.cluster.kind)
    base = base or f"{checked.launch.job_name}-{_digest(checked, site, overrides, backend)}"
    plan = _planned(checked, site, store, base, backend)
    found = [*checked.findings, *check_surroundings(checked, plan, site, backend)]
    if errors_in(found):
        raise UserError(f"{checked.name} is not submitted", findings=found)
    scripts = _scripts(plan, templates, backend)
    return Prepared(checked, site, plan, scripts, tuple(found), base, tuple(templates))


def _scripts(plan: LaunchPlan, templates: Sequence[Path], backend: Backend) -> dict[str, str]:
    """What is submitted, by file name; if a template is the user's own, bash checks its syntax."""
    scripts = {name: render(plan, name, templates) for name in backend.scripts}
    for name, text in scripts.items() if templates else ():
        check_syntax(name, text)
    return scripts


def _digest(checked: Checked, site: Site, overrides: Sequence[Override], backend: Backend) -> str:
    """Equal jobs have equal ids, so that a dry run prints the id that the next submit uses."""
    plan = backend.plan(checked, site, overrides=overrides)
    known = [plan.as_json(), frozen_config(checked, site)["resolved"]]
    if not checked.cluster.traits.shares_files:  # its hosts have jobs of other machines, too
        known.append({"mark": installation_id()})
    text = json.dumps(known, sort_keys=True)
    return f"{zlib.crc32(text.encode()) & 0xFFFFFF:06x}"


def _planned(checked: Checked, site: Site, store: Store, base: str, backend: Backend) -> LaunchPlan:
    """The plan under the first free id of this job: `gpt-3f9a2c`, then `gpt-3f9a2c-2`, …"""
    root = site.absolute(checked.cluster.run_root)
    number = 1
    while True:
        job_id = base if number == 1 else f"{base}-{number}"
        plan = backend.plan(checked, site, JobIdentity(job_id, os.path.join(root, job_id)))
        if not store.holds(job_id) and not os.path.lexists(backend.local_dir(plan)):
            return plan
        number += 1


def _path_here(path: str, plan: LaunchPlan, backend: Backend) -> str:
    """Where a folder of the job is found on this machine."""
    local_dir = backend.local_dir(plan)
    if local_dir == plan.remote_dir or not path:
        return path
    return os.path.join(local_dir, "logs" if path == plan.log_dir else "output")


class Submitted(NamedTuple):
    """A job that exists now. `problem`: what went wrong after it was started; an interrupt has no words."""

    record: JobRecord
    was_interrupted: bool = False
    problem: str = ""


def submit(prepared: Prepared, store: Store, backends: Backends) -> Submitted:
    """Journal, freeze and start the job. What fails before the job exists leaves nothing behind."""
    backend = backends.of(prepared.plan.kind)
    prepared, record = _journal(prepared, store, backend)
    try:
        _freeze(prepared, record)
        record = record._replace(handle=backend.start(prepared.plan, record))
        store.accept(record)
        _point_latest_at(record.local_dir)
    except BaseException as error:
        if not _undo_or_explain(record, store, backend, error):
            with suppress(OSError):  # a later gptctl completes the record
                record = adopt(record, store)
            return Submitted(record, isinstance(error, KeyboardInterrupt), _words(error))
        if isinstance(error, OSError):
            hint = "check run_root in the cluster profile, and the space there"
            message = f"cannot write {record.local_dir}: {_reason(error)}"
            raise UserError(message, hint, OUT_OF_REACH) from None
        raise
    return Submitted(record)


def _undo_or_explain(
    record: JobRecord, store: Store, backend: Backend, error: BaseException
) -> bool:
    try:
        return undo(record, store, backend)
    except UserError as unreachable:
        folder = RunFolder(record.local_dir)
        may_run = folder.in_doubt.exists() or "scheduler_id" in (folder.claimed_by() or {})
        became = "it is not known whether it was started" if may_run else "it was not started"
        hint = "the next gptctl command settles it: gptctl list"
        message = f"{record.id}: {became}; {unreachable.message}"
        raise UserError(message, hint, OUT_OF_REACH) from error


def _reason(error: OSError) -> str:
    import shutil

    if isinstance(error, shutil.Error):  # what copytree collected: source, target, reason
        return str(error.args[0][0][2]).rpartition("] ")[2]
    return error.strerror or str(error)


def _words(error: BaseException) -> str:
    """What went wrong, or nothing when the user interrupted it."""
    return _reason(error) if isinstance(error, OSError) else getattr(error, "message", "")


def _journal(prepared: Prepared, store: Store, backend: Backend) -> tuple[Prepared, JobRecord]:
    while True:
        plan, checked = prepared.plan, prepared.checked
        record = new_record(
            id=plan.job_id,
            name=plan.job_name,
            cluster=plan.cluster,
            kind=plan.kind,
            local_dir=backend.local_dir(plan),
            log_dir=_path_here(plan.log_dir, plan, backend),
            nodes=plan.nodes,
            per_node=plan.per_node,
            world=plan.world,
            config=prepared.site.absolute(str(checked.path)) if checked.path else "",
            output_dir=_path_here(plan.output_dir, plan, backend),
            token=os.urandom(8).hex(),
        )
        if store.add(record):
            return prepared, record
        # Another gptctl has taken the id meanwhile.
        plan = _planned(checked, prepared.site, store, prepared.base_id, backend)
        scripts = _scripts(plan, prepared.templates, backend)
        prepared = prepared._replace(plan=plan, scripts=scripts)


def _freeze(prepared: Prepared, record: JobRecord) -> None:
    """The folder gets its name when it is complete."""
    from gptctl.jobs.freeze import freeze, git_state

    git = prepared.git if prepared.git is not None else git_state(prepared.site.folder)
    part = _part(record)
    with private_files():
        part.parent.mkdir(parents=True, exist_ok=True)
        freeze(
            part,
            prepared.plan,
            prepared.checked,
            prepared.site,
            prepared.scripts,
            prepared.templates,
            git,
        )
        (part / TOKEN).write_text(record.token, encoding="utf-8")
        if os.path.lexists(record.local_dir):
            raise UserError(
                f"{record.local_dir} has just been made by somebody else",
                "submit again",
                OUT_OF_REACH,
            )
        os.rename(part, record.local_dir)


def _part(record: JobRecord) -> Path:
    run = Path(record.local_dir)
    return run.with_name(f".{run.name}.{record.token}")


def undo(record: JobRecord, store: Store, backend: Backend) -> bool:
    """Takes a half-submitted job back; False when it has started."""
    import shutil

    if (
        record.token and read_text(record.run_folder / TOKEN) == record.token
    ):  # else the folder is another's
        if not backend.abandon(record):
            return False
        shutil.rmtree(record.local_dir, ignore_errors=True)
    shutil.rmtree(_part(record), ignore_errors=True)
    store.remove(record)
    return True


def settle(store: Store, backends: Backends) -> list[str]:
    """Complete or undo what a killed gptctl left half-submitted; returns what to tell the user."""
    notes = []
    store.tidy()
    for record in store.pending():
        is_ours = backends.knows(record.kind) and is_here(record.submitter)
        if not is_ours or is_alive(record.submitter):
            continue
        try:
            if undo(record, store, backends.of(record.kind)):
                notes.append(f"{record.id} was never started: its gptctl was killed; files removed")
            else:
                adopt(record, store)
        except (OSError, UserError) as error:
            why = _reason(error) if isinstance(error, OSError) else error.message
            notes.append(f"{record.id} is half-submitted, and cannot be settled now: {why}")
    return notes


def adopt(record: JobRecord, store: Store) -> JobRecord:
    """Completes the record of a job that runs, though its gptctl did not come to it."""
    if claim := RunFolder(record.local_dir).claimed_by():
        record = record._replace(handle=claim)
        store.accept(record)
    return record


def _point_latest_at(run_dir: str) -> None:
    """`runs/latest` is a convenience: where a file of that name stands or links do not work, there is none."""
    link = Path(run_dir).with_name("latest")
    part = link.with_name(f".latest.{os.getpid()}")
    try:
        if link.is_symlink() or not link.exists():
            os.symlink(os.path.basename(run_dir), part)
            os.replace(part, link)
    except OSError:
        part.unlink(missing_ok=True)
