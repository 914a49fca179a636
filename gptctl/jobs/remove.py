"""Remove the run folders of jobs that have ended. Records and history stay, so ids stay known.

Only a folder with the job's token is removed, and links in it are never followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from gptctl.backends import Backends
from gptctl.engine.contract import TOKEN
from gptctl.engine.file_reading import DamagedFile, read_text
from gptctl.engine.job_result import PENDING, RUNNING
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.jobs.array_folders import remove_unused_folder
from gptctl.jobs.costs import keep_ledger
from gptctl.jobs.history import History
from gptctl.jobs.state import is_final, is_removed, refuse_if_not_ended, state_of
from gptctl.jobs.store import NEWEST, JobRecord, Store
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, UserError


def check_removable(record: JobRecord, store: Store, backends: Backends) -> None:
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
    if users := _needed_by(record, store, backends):
        message = f"{record.id} is needed by unfinished jobs: {', '.join(users)}"
        raise UserError(message, "wait for them, or stop them first", ANSWER_IS_NO)


def _needed_by(record: JobRecord, store: Store, backends: Backends) -> list[str]:
    """The jobs that wait for this one, or may load its checkpoints."""
    others = [other for other in store.records(last=NEWEST) if other.id != record.id]
    using = [other for other in others if _uses(other, record)]
    return [other.id for other in using if not is_final(state_of(other, backends))]


def _uses(other: JobRecord, record: JobRecord) -> bool:
    # A job that has ended needs nothing; most have, so this is asked first.
    if RunFolder(other.local_dir).result() or History().state(other):
        return False
    try:
        plan, root = read_plan(other.run_folder), read_plan(record.run_folder).remote_dir
    except DamagedFile:
        return False
    waits = any(dependency.get("job") == record.id for dependency in plan.after)
    # The jobs of a chain train in the output folder of the first one.
    return waits or any(_is_below(path, root) for path in (*plan.inputs, plan.output_dir))


def continued_by(record: JobRecord, store: Store) -> list[str]:
    """The jobs that lose a part of their run with this folder: those that continue it directly."""
    if not record.run_folder.is_dir():
        return []
    return [
        other.id
        for other in store.records(last=NEWEST)
        if other.id != record.id
        and (other.continues == record.id or _trains_in(other, record.run_folder))
    ]


def _trains_in(other: JobRecord, folder: Path) -> bool:
    # The jobs of a chain keep their checkpoints in the folder of the first one.
    return bool(other.output_dir) and _is_below(other.output_dir, str(folder))


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


def size_of(folder: Path) -> int:
    """Add up the bytes of all files; links count as links."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            # A file may disappear meanwhile.
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


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
