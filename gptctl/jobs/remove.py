"""Remove the run folders of jobs that have ended. Records and history stay, so ids stay known.

Only a folder with the job's token is removed, and links in it are never followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gptctl.backends import Backends
from gptctl.engine.contract import TOKEN
from gptctl.engine.file_reading import DamagedFile, read_text
from gptctl.engine.job_result import PENDING, RUNNING
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.jobs.array_folders import remove_unused_folder
from gptctl.jobs.costs import keep_ledger
from gptctl.jobs.history import History
from gptctl.jobs.state import is_final, is_removed, refuse_if_not_ended, state_of
from gptctl.jobs.store import JobRecord, Store
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, UserError


class Unfinished(NamedTuple):
    """A job that may still run, and what it needs."""

    record: JobRecord
    plan: LaunchPlan


def unfinished_jobs(records: Iterable[JobRecord]) -> list[Unfinished]:
    """The jobs that may need another one. Read once: most have ended, as their folders say."""
    found = []
    for record in records:
        if not (RunFolder(record.local_dir).result() or History().state(record)):
            with suppress(DamagedFile):
                found.append(Unfinished(record, read_plan(record.run_folder)))
    return found


def check_removable(
    record: JobRecord, unfinished: Sequence[Unfinished], backends: Backends
) -> None:
    """Raise UserError if the job may still run, is still needed, or its folder is not its own."""
    state = state_of(record, backends)
    if state.state in (PENDING, RUNNING):
        hint = f"stop it first: gptctl cancel {record.id}"
        raise UserError(f"{record.id} is {state.state}", hint, ANSWER_IS_NO)
    if not is_final(state):
        hint = f"try again when its state is known: gptctl status {record.id}"
        raise UserError(f"{record.id} may still be running: {state}", hint, OUT_OF_REACH)
    refuse_if_not_ended(record)
    if os.path.lexists(record.local_dir) and not _is_own(record):
        message = f"{record.local_dir} is not the folder of {record.id}: it has another token"
        raise UserError(message, "check what it is, and delete it by hand", ANSWER_IS_NO)
    if users := _needed_by(record, unfinished, backends):
        message = f"{record.id} is needed by unfinished jobs: {', '.join(users)}"
        raise UserError(message, "wait for them, or stop them first", ANSWER_IS_NO)


def _needed_by(
    record: JobRecord, unfinished: Sequence[Unfinished], backends: Backends
) -> list[str]:
    """The jobs that wait for this one, or may load its checkpoints."""
    try:
        root = read_plan(record.run_folder).remote_dir
    except DamagedFile:
        root = record.dir_on_nodes
    using = [each.record for each in unfinished if _uses(each.plan, record.id, root)]
    others = [other for other in using if other.id != record.id]
    return [other.id for other in others if not is_final(state_of(other, backends))]


def _uses(plan: LaunchPlan, job: str, root: str) -> bool:
    waits = any(dependency.get("job") == job for dependency in plan.after)
    # The jobs of a chain train in the output folder of the first one.
    return waits or any(_is_below(path, root) for path in (*plan.inputs, plan.output_dir))


def continued_by(records: Sequence[JobRecord], known: Iterable[JobRecord]) -> dict[str, list[str]]:
    """The jobs that lose a part of their run with these folders: they continue one directly."""
    here = {record.run_folder: record.id for record in records if record.run_folder.is_dir()}
    found: dict[str, list[str]] = {job: [] for job in here.values()}
    for other in known:
        # The jobs of a chain keep their checkpoints in the folder of the first one.
        lost = {other.continues, *owners(other.output_dir, here)} - {other.id}
        for job in lost & found.keys():
            found[job].append(other.id)
    return found


def owners(path: str, roots: Mapping[Path, str]) -> set[str]:
    """The jobs in whose folder a path is; `roots` are their folders."""
    # By the folders above it: there may be thousands of jobs, but not of levels.
    places = (Path(path), *Path(path).parents) if path else ()
    return {roots[place] for place in places if place in roots}


def removed_before(record: JobRecord) -> float | None:
    """When the job was removed; None if there still is something to remove."""
    return None if os.path.lexists(record.local_dir) else History().removed(record)


def remove(record: JobRecord, backends: Backends, here_only: bool = False) -> float:
    """Remove the folder of a job on all machines; return when that was."""
    if record.run_folder.is_dir():
        keep_ledger(record, state_of(record, backends).state, Store(), time.time())
    # Other machines first: where they are is written in the folder on this one.
    if record.run_folder.is_dir() and not here_only:
        backends.of(record.kind).remove(record)
    hidden = record.run_folder.with_name(f".{record.run_folder.name}.{record.token}")
    try:
        # Under its hidden name a half-removed folder cannot be taken for a job.
        if os.path.lexists(record.local_dir):
            _unlink_latest(record)
            with suppress(FileNotFoundError):  # another gptctl removes it, too
                os.rename(record.local_dir, hidden)
        if record.token:
            remove_tree(hidden)
        remove_unused_folder(record)
        # Of a folder that was deleted by hand before, nothing may be kept yet.
        if not is_removed(record):
            History().keep(record, state_of(record, backends).as_json())
        moment = History().removed(record) or time.time()
        History().mark_removed(record, moment)
    except OSError as error:
        where = error.filename or record.local_dir
        # rmtree names what it cannot remove without its folder.
        where = where if os.path.isabs(where) else f"{where} in {hidden}"
        message = f"cannot remove {where}: {error.strerror or error}"
        hint = f"then run it again: gptctl rm {record.id}"
        raise UserError(message, f"check its permissions, {hint}", OUT_OF_REACH) from None
    return moment


def remove_tree(folder: Path) -> None:
    # rmtree removes links, and refuses to follow them even if they appear meanwhile. It raises
    # FileNotFoundError if another gptctl removes the same folder: together they get it done.
    while folder.is_dir():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except RecursionError:  # a program can nest folders deeper than Python can follow
            subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)
            if folder.is_dir():
                raise OSError(errno.EACCES, "cannot remove it", str(folder)) from None


def folders_outside(record: JobRecord) -> list[str]:
    """Return the folders of the job that are outside of its run folder."""
    try:
        plan = read_plan(record.run_folder)
    except DamagedFile:  # the folder is already missing, or damaged
        return []
    root = plan.remote_dir
    where = "" if root == record.local_dir else " (on its hosts)"
    outside = [
        each for each in (plan.log_dir, plan.output_dir) if each and not _is_below(each, root)
    ]
    return [f"{folder}{where}" for folder in outside]


def _is_own(record: JobRecord) -> bool:
    # A link may lead to a folder that others use, too.
    if os.path.islink(record.local_dir) or not record.token:
        return False
    return read_text(record.run_folder / TOKEN) == record.token


def _is_below(folder: str, root: str) -> bool:
    return Path(folder).is_relative_to(root)


def _unlink_latest(record: JobRecord) -> None:
    """Remove `runs/latest` if it points to this job."""
    link = record.run_folder.with_name("latest")
    with suppress(OSError):
        if os.readlink(link) == record.run_folder.name:
            link.unlink()
