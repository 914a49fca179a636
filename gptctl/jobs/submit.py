"""Submit a job: check, plan, render, record, freeze, start.

If a step fails before the backend has the job, everything is undone. If gptctl is killed, the next
gptctl command settles what it left.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trainer
from gptctl.backends import Backend, Backends
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import CONTINUES_VARIABLE, TOKEN
from gptctl.engine.file_reading import read_text
from gptctl.engine.launch_plan import LaunchPlan, StartConditions
from gptctl.engine.processes import is_alive, is_here
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.array_folders import remove_unused_folder
from gptctl.jobs.config_differences import Difference, differences
from gptctl.jobs.first_job import first_job, first_of_writer
from gptctl.jobs.freeze import frozen_config
from gptctl.jobs.labels import NO_LABELS, Labels, LabelStore
from gptctl.jobs.preflight import run_preflight
from gptctl.jobs.resume import ResumePoint, check_resume, check_snapshot_left, resume_notes
from gptctl.jobs.shared_outputs import check_shared_outputs
from gptctl.jobs.snapshots import SNAPSHOT_PATH, Snapshot, read_snapshot, snapshot_file
from gptctl.jobs.store import JobRecord, Store, new_record
from gptctl.planning.build import JobIdentity, Site
from gptctl.planning.render import check_syntax, render
from gptctl.planning.user_templates import UserTemplate, template_sources
from gptctl.spec.check import Checked
from gptctl.spec.machine_rules import NO_GPU_HERE, check_gpus_here
from gptctl.spec.resources import installation_id
from gptctl.spec.start_checkpoint import check_start
from gptctl.spec.trust import Source, require_trust
from trainer.config import Override
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, Finding, UserError, errors_in
from trainer.named_tuple import NamedTuple

START_AT_ONCE = StartConditions()


class Prepared(NamedTuple):
    """A job that is ready to be submitted: its plan and the exact text of its scripts."""

    checked: Checked
    site: Site
    plan: LaunchPlan
    scripts: dict[str, str]
    findings: tuple[Finding, ...]
    base_id: str
    templates: tuple[UserTemplate, ...]
    git: Mapping[str, Any] | None = None  # state of the repository; None: read it on submit
    conditions: StartConditions = START_AT_ONCE
    continues: str = ""  # id of the job whose checkpoint it resumes
    rerun_of: str = ""  # id of the job whose folder it was prepared from
    sweep: str = ""  # id of the sweep that it belongs to, and its number there
    sweep_index: int = 0
    notes: tuple[str, ...] = ()  # what the user should know before the job starts
    labels: Labels = NO_LABELS

    @property
    def sources(self) -> list[Source]:
        """The files that decide what runs, besides the program itself."""
        return [*self.checked.sources, *template_sources(self.templates)]


def this_site() -> Site:
    """Where gptctl runs: current folder, interpreter, trainer package."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the current folder has been deleted", "change to another folder", WRONG_USAGE
        ) from None
    # Paths go into scripts and JSON; a name that is not UTF-8 cannot.
    if any(not character.isprintable() for character in folder):
        message = "the path of the current folder contains control characters, or is not UTF-8"
        raise UserError(message, "rename it, or change to another folder", WRONG_USAGE)
    return Site(folder, sys.executable, os.path.dirname(os.path.abspath(trainer.__file__)))


def prepare(
    checked: Checked,
    store: Store,
    backends: Backends,
    site: Site,
    overrides: Sequence[Override] = (),
    templates: Sequence[UserTemplate] = (),
    base: str = "",
    conditions: StartConditions = START_AT_ONCE,
    resumes: ResumePoint | None = None,
) -> Prepared:
    """Check, plan and render a job; raise UserError with all findings if it cannot start."""
    if not checked.is_valid:
        raise UserError("the job was not submitted", findings=checked.findings)
    backend = backends.of(checked.cluster.kind)
    base = base or f"{checked.launch.job_name}-{_digest(checked, site, overrides, backend)}"
    # A job of a chain finds the snapshot of the one before it: how far that is, nobody knows yet.
    snapshot = None if conditions.continues else read_snapshot(snapshot_file(checked, site))
    if resumes:
        conditions = conditions._replace(first_job=first_job(resumes, store, backends))
    elif snapshot:
        conditions = conditions._replace(first_job=first_of_writer(snapshot.job, store))
    plan = _planned(checked, site, store, base, backend, conditions)
    found = [*checked.findings, *run_preflight(checked, plan, site, backend)]
    found += check_resume(resumes, checked, site) if resumes else check_start(checked, site.folder)
    found += check_shared_outputs(checked, site, store, backends, conditions)
    found += check_snapshot_left(checked, snapshot) if snapshot else ()
    if errors_in(found):
        raise UserError("the job was not submitted", findings=found)
    scripts = _scripts(plan, templates, backend)
    prepared = Prepared(checked, site, plan, scripts, tuple(found), base, tuple(templates))
    prepared = prepared._replace(conditions=conditions)
    if resumes:
        return _resuming(prepared, resumes)
    return _with_snapshot(prepared, snapshot, store) if snapshot else prepared


def _resuming(prepared: Prepared, point: ResumePoint) -> Prepared:
    notes = resume_notes(point, differences_from(point.asked, prepared))
    return prepared._replace(continues=point.record.id, notes=tuple(notes))


def _with_snapshot(prepared: Prepared, snapshot: Snapshot, store: Store) -> Prepared:
    """Say that a job continues although nobody asked for it: minGPT loads what it finds."""
    # It is then one run with the job that wrote the snapshot.
    writer = snapshot.job if snapshot.job and store.holds(snapshot.job) else ""
    note = f"continues {writer or 'an earlier run'} from the snapshot of {snapshot} in"
    another = f"to start from step 0, delete it or set another {SNAPSHOT_PATH}"
    return prepared._replace(continues=writer, notes=(f"{note} {snapshot.file}; {another}",))


def differences_from(record: JobRecord, prepared: Prepared) -> list[Difference]:
    """Compare a job with an earlier one."""
    now = frozen_config(prepared.checked, prepared.site)["resolved"]
    return differences(record, prepared.checked, now)


def _scripts(
    plan: LaunchPlan, templates: Sequence[UserTemplate], backend: Backend
) -> dict[str, str]:
    """Render the scripts of the job, by file name."""
    scripts = {name: render(plan, name, templates) for name in backend.scripts}
    # Our own templates are tested; those of users are checked by bash.
    for name, text in scripts.items() if templates else ():
        check_syntax(name, text)
    return scripts


def _digest(checked: Checked, site: Site, overrides: Sequence[Override], backend: Backend) -> str:
    """Hash everything that defines the job."""
    # Equal jobs have equal ids, so that a dry run prints the id that the next submit uses.
    plan = backend.plan(checked, site, overrides=overrides)
    known = [plan.as_json(), frozen_config(checked, site)["resolved"]]
    # Other machines may have jobs of other users and installations, whose ids must differ.
    if not checked.cluster.sees_files:
        known.append({"mark": installation_id()})
    text = json.dumps(known, sort_keys=True)
    return f"{zlib.crc32(text.encode()) & 0xFFFFFF:06x}"


def _planned(
    checked: Checked,
    site: Site,
    store: Store,
    base: str,
    backend: Backend,
    conditions: StartConditions,
) -> LaunchPlan:
    """Plan the job with the first free id: `gpt-3f9a2c`, then `gpt-3f9a2c-2`, …"""
    root = site.absolute(checked.cluster.run_root)
    number = 1
    while True:
        job_id = base if number == 1 else f"{base}-{number}"
        plan = backend.plan(checked, site, JobIdentity(job_id, os.path.join(root, job_id)))
        # A folder without a record may be left from another GPTCTL_HOME.
        if not store.holds(job_id) and not os.path.lexists(backend.local_dir(plan)):
            return _with_conditions(plan, conditions)
        number += 1


def _with_conditions(plan: LaunchPlan, conditions: StartConditions) -> LaunchPlan:
    plan = plan._replace(**conditions._asdict())
    if not conditions.continues:
        return plan
    env = {**plan.env, CONTINUES_VARIABLE: "1"}
    return plan._replace(env=env, env_origins={**plan.env_origins, CONTINUES_VARIABLE: "gptctl"})


def _path_here(path: str, plan: LaunchPlan, backend: Backend) -> str:
    """Where a folder of the job is on this machine: for remote hosts, its local copy."""
    local_dir = backend.local_dir(plan)
    if local_dir == plan.remote_dir or not path:
        return path
    return os.path.join(local_dir, "logs" if path == plan.log_dir else "output")


class Submitted(NamedTuple):
    """A job that has started. `problem`: what failed after the start; empty for an interrupt."""

    record: JobRecord
    was_interrupted: bool = False
    problem: str = ""


def submit(prepared: Prepared, store: Store, backends: Backends) -> Submitted:
    """Record, freeze and start the job. If a step fails before it exists, undo all of them."""
    refuse_without_gpus(prepared)
    require_trust(prepared.sources)
    backend = backends.of(prepared.plan.kind)
    # The record comes first: whatever is created after it can be found and removed.
    prepared, record = add_record(prepared, store, backend)
    try:
        LabelStore(store.folder.parent).keep(record, prepared.labels)
        freeze_job(prepared, record)
        record = record._replace(handle=backend.start(prepared.plan, record))
        store.accept(record)
        _point_latest_at(record.local_dir)
    except BaseException as error:  # also KeyboardInterrupt: the job may have started already
        if not _undo_or_explain(record, store, backend, error):
            # The job runs, so this is not a failure. A later gptctl completes the record if
            # this one cannot.
            with suppress(OSError):
                record = complete_record(record, store)
            return Submitted(record, isinstance(error, KeyboardInterrupt), _message_of(error))
        if isinstance(error, OSError):
            raise cannot_write(record.local_dir, error) from None
        raise
    return Submitted(record)


def cannot_write(folder: str, error: OSError) -> UserError:
    hint = "check run_root in the cluster profile, and the free space there"
    return UserError(f"cannot write {folder}: {_reason(error)}", hint, OUT_OF_REACH)


def refuse_without_gpus(prepared: Prepared) -> None:
    """Refuse a job that needs GPUs on a machine without any: it would fail half a minute later."""
    # A dry run shows such a job: it may be meant for another machine.
    if lacking := [*check_gpus_here(prepared.checked)]:
        errors = [each._replace(level="error", message=NO_GPU_HERE) for each in lacking]
        raise UserError("the job was not submitted", findings=errors)


def _undo_or_explain(
    record: JobRecord, store: Store, backend: Backend, error: BaseException
) -> bool:
    """Undo the submission; if the backend cannot be reached, say what is known of the job."""
    try:
        return undo(record, store, backend)
    except UserError as unreachable:
        folder = RunFolder(record.local_dir)
        # In doubt: the start was requested, but no answer came.
        may_run = folder.in_doubt_file.exists() or "scheduler_id" in (folder.claimed_by() or {})
        outcome = "it may have been started" if may_run else "it was not started"
        hint = "run `gptctl list` later: it completes or removes the job"
        message = f"{record.id}: {outcome}; {unreachable.message}"
        raise UserError(message, hint, OUT_OF_REACH) from error


def _reason(error: OSError) -> str:
    import shutil

    if isinstance(error, shutil.Error):  # what copytree collected: source, target, reason
        return str(error.args[0][0][2]).rpartition("] ")[2].partition(": '")[0]
    return error.strerror or str(error)


def _message_of(error: BaseException) -> str:
    """The message of an error; empty if the user interrupted gptctl."""
    return _reason(error) if isinstance(error, OSError) else getattr(error, "message", "")


def add_record(  # nosec B107  # empty: a new one
    prepared: Prepared, store: Store, backend: Backend, token: str = "", array_dir: str = ""
) -> tuple[Prepared, JobRecord]:
    """Record the job under a free id; plan it again if another gptctl takes the id.

    The tasks of a Slurm array have one `token` and one `array_dir`.
    """
    # Each turn loses the id to another gptctl, so this ends.
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
            continues=prepared.continues,
            rerun_of=prepared.rerun_of,
            sweep=prepared.sweep,
            sweep_index=prepared.sweep_index,
            array_dir=array_dir,
            token=token or new_token(),
            login=plan.login,
            remote_dir=plan.remote_dir,
        )
        if store.add(record):
            return prepared, record
        # Another gptctl has taken the id in the meantime: use the next free one.
        conditions = prepared.conditions
        plan = _planned(checked, prepared.site, store, prepared.base_id, backend, conditions)
        scripts = _scripts(plan, prepared.templates, backend)
        prepared = prepared._replace(plan=plan, scripts=scripts)


def new_token() -> str:
    return os.urandom(8).hex()


def freeze_job(prepared: Prepared, record: JobRecord) -> None:
    """Write the job's folder under a temporary name, and rename it when it is complete."""
    from gptctl.jobs.freeze import freeze
    from gptctl.jobs.git_state import git_state

    git = prepared.git if prepared.git is not None else git_state(prepared.site.folder)
    part = _part(record)
    with private_files():
        part.parent.mkdir(parents=True, exist_ok=True)
        sources = (prepared.checked, prepared.site, prepared.scripts, prepared.templates)
        freeze(part, prepared.plan, *sources, git)
        # The token tells `undo` that the folder belongs to this record.
        (part / TOKEN).write_text(record.token, encoding="utf-8")
        # rename would replace an empty folder without an error.
        if os.path.lexists(record.local_dir):
            message = f"{record.local_dir} has just been created by another process"
            raise UserError(message, "submit again", OUT_OF_REACH)
        os.rename(part, record.local_dir)


def _part(record: JobRecord) -> Path:
    run = Path(record.local_dir)
    return run.with_name(f".{run.name}.{record.token}")


def undo(record: JobRecord, store: Store, backend: Backend, was_sent: bool = True) -> bool:
    """Remove a half-submitted job; return False if it has started.

    `was_sent`: the backend may know the job, and has to forget it.
    """
    import shutil

    # Without this token the folder belongs to another job, and is left alone.
    if record.token and read_text(record.run_folder / TOKEN) == record.token:
        if was_sent and not backend.abandon(record):
            return False
        shutil.rmtree(record.local_dir, ignore_errors=True)
    shutil.rmtree(_part(record), ignore_errors=True)
    remove_unused_folder(record)
    store.remove(record)
    return True


def finish_interrupted_submits(store: Store, backends: Backends) -> list[str]:
    """Complete or undo what a killed gptctl left half-submitted; return messages for the user."""
    # A gptctl that is still running, or may be running on another machine, settles its own job.
    interrupted = [
        record
        for record in store.pending()
        if backends.knows(record.kind)
        and is_here(record.submitter)
        and not is_alive(record.submitter)
    ]
    if not interrupted:
        return []
    from gptctl.remote.parallel import in_parallel, successful

    # All at once: hosts that do not answer are waited for together.
    with private_files():
        notes = in_parallel(lambda record: _settle(record, store, backends), interrupted)
    return [note for note in successful(notes) if note]


def _settle(record: JobRecord, store: Store, backends: Backends) -> str:
    """Complete or undo one submission; return a message if the user should know."""
    try:
        if undo(record, store, backends.of(record.kind)):
            return f"{record.id} was not started: gptctl was killed; its files are removed"
        complete_record(record, store)
        return ""
    except (OSError, UserError) as error:
        why = _reason(error) if isinstance(error, OSError) else error.message
        return f"{record.id} is half-submitted, and cannot be completed or removed now: {why}"


def complete_record(record: JobRecord, store: Store) -> JobRecord:
    """Complete the record of a job that has started, although its gptctl was stopped before."""
    # The job itself has written into its folder how the backend identifies it.
    if claim := RunFolder(record.local_dir).claimed_by():
        record = record._replace(handle=claim)
        store.accept(record)
    return record


def _point_latest_at(run_dir: str) -> None:
    """Make `runs/latest` a link to the job's folder, if possible."""
    # A convenience only: a file of that name stays, and errors are ignored. The link is replaced
    # by renaming, so that it never is missing.
    link = Path(run_dir).with_name("latest")
    part = link.with_name(f".latest.{os.getpid()}")
    try:
        if link.is_symlink() or not link.exists():
            os.symlink(os.path.basename(run_dir), part)
            os.replace(part, link)
    except OSError:
        part.unlink(missing_ok=True)
