"""The story of one submit: check, plan, render, journal, freeze, start. Until the job exists, all can be undone."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import trainer
from gptctl.backends import KINDS, backend_of
from gptctl.engine.contract import AGENT_SCRIPT, BATCH_SCRIPT, LAUNCH_SCRIPT, TOKEN
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import is_alive, is_here
from gptctl.engine.run_folder import RunFolder, read_json, read_text
from gptctl.jobs.preflight import check_surroundings
from gptctl.jobs.store import JobRecord, Store, home, new_record, own_mark, private_files
from gptctl.planning.build import Ground, Site, build_plan
from gptctl.planning.render import check_syntax, render
from gptctl.spec.check import Checked, check_config
from gptctl.spec.summary import frozen_config
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
    site: Site,
    overrides: Sequence[Override] = (),
    templates: Sequence[Path] = (),
    base: str = "",
) -> Prepared:
    """Everything but the deed. Raises UserError with all findings when the job cannot start right."""
    if not checked.is_valid:
        raise UserError(f"{checked.name} is not submitted", findings=checked.findings)
    base = base or f"{checked.launch.job_name}-{_digest(checked, site, overrides)}"
    plan = _planned(checked, site, store, base)
    found = [*checked.findings, *check_surroundings(checked, plan, site)]
    if errors_in(found):
        raise UserError(f"{checked.name} is not submitted", findings=found)
    return Prepared(
        checked, site, plan, _scripts(plan, templates), tuple(found), base, tuple(templates)
    )


def _scripts(plan: LaunchPlan, templates: Sequence[Path]) -> dict[str, str]:
    """What is submitted, by file name; where a template is the user's own, bash reads it first."""
    names = {"slurm": [BATCH_SCRIPT, LAUNCH_SCRIPT], "ssh": [AGENT_SCRIPT, LAUNCH_SCRIPT]}.get(
        plan.kind, [LAUNCH_SCRIPT]
    )
    scripts = {name: render(plan, name, templates) for name in names}
    for name, text in scripts.items() if templates else ():
        check_syntax(name, text)
    return scripts


def prepare_rerun(record: JobRecord, store: Store, overrides: Sequence[Override]) -> Prepared:
    """The same job again, from nothing but its folder."""
    folder = record.run_folder
    before = read_json(folder / "plan.json")
    if before is None:
        raise UserError(f"{folder} has no plan any more", "submit its config again", OUT_OF_REACH)
    if not (folder / "code" / "rank_log.py").is_file():
        raise UserError(
            f"{folder}/code is gone or damaged", "submit its config again", OUT_OF_REACH
        )
    site = Site(before["work_dir"], before["python"], str(folder / "code" / "trainer"))
    is_here = record.kind == "local" and os.path.isabs(before["python"])
    if is_here and not os.access(before["python"], os.X_OK):
        raise UserError(
            f"the interpreter of {record.id} is gone: {before['python']}", "submit its config again"
        )
    kept = [Override("Engine.save_load.output_dir", "", "a folder of its own")]
    kept += [
        Override(
            "Launch.cluster", str(folder / "cluster.json"), "the job's own profile", verbatim=True
        )
    ]
    if not record.output_dir:
        script = os.path.basename(before["program"][1])
        files = sorted(
            entry for entry in os.listdir(folder / "code") if entry not in (script, "rank_log.py")
        )
        kept.append(
            Override(
                "Launch.entrypoint",
                str(folder / "code" / script),
                "the job's own code",
                verbatim=True,
            )
        )
        kept.append(
            Override(
                "Launch.files",
                tuple(str(folder / "code" / file) for file in files),
                "the job's own code",
            )
        )
        site = site._replace(trainer=str(folder / "code"))
    checked = _with_first_origins(check_config(folder / "config.json", [*kept, *overrides]), folder)
    # The same job again: another number of the same name.
    base = "" if overrides else re.sub(r"(-[0-9a-f]{6})-\d+$", r"\1", record.id)
    prepared = prepare(checked, store, site, overrides, [folder / "templates"], base)
    return prepared._replace(git=read_json(folder / "git.json") or {})


def _with_first_origins(checked: Checked, folder: Path) -> Checked:
    """Values of a frozen config came from where they came from when it was frozen."""
    config, first = (
        str(folder / "config.json"),
        (read_json(folder / "config.json") or {}).get("origins", {}),
    )

    def before(origins: Mapping[str, str]) -> dict[str, str]:
        return {
            key: first.get(key, origin) if origin.startswith(config) else origin
            for key, origin in origins.items()
        }

    resolved = checked.resolved and checked.resolved._replace(
        origins=before(checked.resolved.origins)
    )
    return checked._replace(resolved=resolved, launch_origins=before(checked.launch_origins))


def _digest(checked: Checked, site: Site, overrides: Sequence[Override]) -> str:
    """Equal jobs have equal ids, so that a dry run prints the very id that the next submit uses."""
    plan = build_plan(checked, site, overrides=overrides)
    known = [plan.as_json(), frozen_config(checked, site)["resolved"]]
    if plan.kind == "ssh":  # whose hosts have jobs of others, of which this machine knows nothing
        known.append({"mark": own_mark()})
    text = json.dumps(known, sort_keys=True)
    return f"{zlib.crc32(text.encode()) & 0xFFFFFF:06x}"


def _planned(checked: Checked, site: Site, store: Store, base: str) -> LaunchPlan:
    """The plan under the first id of this job that is free: `gpt-3f9a2c`, then `gpt-3f9a2c-2`, …"""
    root = site.absolute(checked.cluster.run_root)
    number = 1
    while True:
        job_id = base if number == 1 else f"{base}-{number}"
        plan = build_plan(checked, site, Ground(job_id, os.path.join(root, job_id)))
        if not store.holds(job_id) and not os.path.lexists(folder_here(plan)):
            return plan
        number += 1


def folder_here(plan: LaunchPlan) -> str:
    """The job's folder on this machine: for ssh hosts, a copy of what they have."""
    return str(home() / "runs" / plan.job_id) if plan.kind == "ssh" else plan.run_dir


def _here(path: str, plan: LaunchPlan) -> str:
    """Where a folder of the job is found on this machine."""
    if plan.kind != "ssh" or not path:
        return path
    name = "logs" if path == plan.log_dir else "output"
    return os.path.join(folder_here(plan), name)


def submit(prepared: Prepared, store: Store) -> JobRecord:
    """Journals, freezes and starts the job; what fails or is interrupted before it exists leaves nothing."""
    backend = backend_of(prepared.plan.kind)
    prepared, record = _journal(prepared, store)
    try:
        _freeze(prepared, record)
        record = record._replace(handle=backend.start(prepared.plan, record))
        store.accept(record)
        _point_latest_at(record.run_dir)
    except BaseException as error:
        if not _undo_or_say(record, store, error):
            with suppress(OSError):  # a later gptctl completes the record
                record = adopt(record, store)
            raise Interrupted(record, _words(error)) from error
        if isinstance(error, OSError):
            hint = "check run_root in the cluster profile, and the space there"
            raise UserError(
                f"cannot write {record.run_dir}: {_reason(error)}", hint, OUT_OF_REACH
            ) from None
        raise
    return record


def _undo_or_say(record: JobRecord, store: Store, error: BaseException) -> bool:
    try:
        return undo(record, store)
    except UserError as silent:
        folder = RunFolder(record.run_dir)
        may_run = folder.in_doubt.exists() or "scheduler_id" in (folder.claimed_by() or {})
        became = "it is not known whether it was started" if may_run else "it was not started"
        hint = "the next gptctl settles it: gptctl list"
        raise UserError(f"{record.id}: {became}; {silent.message}", hint, OUT_OF_REACH) from error


def _reason(error: OSError) -> str:
    import shutil

    if isinstance(error, shutil.Error):  # what copytree collected: source, target, reason
        return str(error.args[0][0][2]).rpartition("] ")[2]
    return error.strerror or str(error)


def _words(error: BaseException) -> str:
    """What went wrong, or nothing when the user interrupted it."""
    return _reason(error) if isinstance(error, OSError) else getattr(error, "message", "")


class Interrupted(Exception):
    """gptctl was interrupted by the user, or something went wrong at the end (`reason`), but the job exists."""

    def __init__(self, record: JobRecord, reason: str) -> None:
        super().__init__(record.id)
        self.record, self.reason = record, reason


def _journal(prepared: Prepared, store: Store) -> tuple[Prepared, JobRecord]:
    while True:
        plan, checked = prepared.plan, prepared.checked
        record = new_record(
            id=plan.job_id,
            name=plan.job_name,
            cluster=plan.cluster,
            kind=plan.kind,
            run_dir=folder_here(plan),
            log_dir=_here(plan.log_dir, plan),
            nodes=plan.nodes,
            per_node=plan.per_node,
            world=plan.world,
            config=prepared.site.absolute(str(checked.path)) if checked.path else "",
            output_dir=_here(plan.output_dir, plan),
            token=os.urandom(8).hex(),
        )
        if store.add(record):
            return prepared, record
        # Another gptctl took the id since.
        plan = _planned(checked, prepared.site, store, prepared.base_id)
        prepared = prepared._replace(plan=plan, scripts=_scripts(plan, prepared.templates))


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
        if os.path.lexists(record.run_dir):
            raise UserError(
                f"{record.run_dir} has just been made by somebody else",
                "submit again",
                OUT_OF_REACH,
            )
        os.rename(part, record.run_dir)


def _part(record: JobRecord) -> Path:
    run = Path(record.run_dir)
    return run.with_name(f".{run.name}.{record.token}")


def undo(record: JobRecord, store: Store) -> bool:
    """Takes a half-submitted job back; False when it has started."""
    import shutil

    if (
        record.token and read_text(record.run_folder / TOKEN) == record.token
    ):  # else the folder is another's
        if not backend_of(record.kind).abandon(record):
            return False
        shutil.rmtree(record.run_dir, ignore_errors=True)
    shutil.rmtree(_part(record), ignore_errors=True)
    store.remove(record)
    return True


def sweep(store: Store) -> list[str]:
    """Settles what a killed gptctl left half-done: a job that has started is adopted, any other is taken back."""
    notes = []
    store.tidy()
    for record in store.pending():
        if record.kind not in KINDS or is_alive(record.submitter) or not is_here(record.submitter):
            continue
        try:
            if undo(record, store):
                notes.append(
                    f"{record.id} was never started, since its gptctl was killed; its files are removed"
                )
            else:
                adopt(record, store)
        except (OSError, UserError) as error:
            why = _reason(error) if isinstance(error, OSError) else error.message
            notes.append(f"{record.id} was left half-submitted, and cannot be tidied up now: {why}")
    return notes


def adopt(record: JobRecord, store: Store) -> JobRecord:
    """Completes the record of a job that runs, though its gptctl did not come to it."""
    if claim := RunFolder(record.run_dir).claimed_by():
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
