"""The job store: one JSON file per job under GPTCTL_HOME.

Files are written atomically, and many gptctl processes may use the store at once. A record says
what was submitted and where its files are. It does not hold the state of the job: the backend
reports that.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.processes import this_process
from gptctl.engine.run_folder import is_scheduler_id
from gptctl.spec.resources import home
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError, closest

SCHEMA = 1
# Files beside the record of a job: see `history.py`.
ENDED, REMOVED = ".ended", ".removed"
NEWEST = 500  # records that are searched for the latest job of a folder: opening all may be slow
MAX_RECORD = 1 << 20  # bytes that are read of a record: a damaged one may be of any size
_HASH = re.compile(r"-([0-9a-f]{6}(?:-\d+)?)$")  # of `gpt-3f9a2c` and `gpt-3f9a2c-2`
NOTHING: Mapping[str, Any] = MappingProxyType({})


# Fields that a damaged record may have with another type.
TEXT_FIELDS = (
    *("id", "name", "local_dir", "log_dir", "output_dir", "kind", "folder", "login", "remote_dir"),
    *("continues", "sweep", "array_dir"),
)


class JobRecord(NamedTuple):
    """What gptctl knows of a job. `schema` is the version of its file format."""

    id: str
    name: str
    created: float
    cluster: str
    kind: str
    local_dir: str  # the job's folder on this machine; run_dir in its file and in --json
    log_dir: str
    nodes: int
    per_node: int
    world: int
    config: str = ""
    output_dir: str = ""  # of the bundled trainer; empty for a script
    submitter: Mapping[str, Any] = NOTHING  # the gptctl process that submits it
    continues: str = ""  # id of the job whose checkpoint it resumes
    sweep: str = ""  # id of the sweep that it belongs to, and its number there
    sweep_index: int = 0
    array_dir: str = ""  # folder of the Slurm array that it is a task of
    token: str = ""  # marks the folder that belongs to this record
    folder: str = ""  # where gptctl was started; empty in records of older versions
    # How the backend identifies the job; empty until the backend has accepted it.
    handle: Mapping[str, Any] = NOTHING
    login: str = ""  # the login host of its cluster; empty: gptctl runs on the cluster
    remote_dir: str = ""  # the job's folder, as its nodes see it; empty: local_dir
    schema: int = SCHEMA

    @property
    def dir_on_nodes(self) -> str:
        return self.remote_dir or self.local_dir

    @property
    def run_folder(self) -> Path:
        return Path(self.local_dir)


class Store:
    """Reads and writes the records of all jobs.

    Until the backend has accepted a job, `<id>.<token>.pending` exists beside its `<id>.json`. So
    jobs that a killed gptctl left half-submitted are found without reading all records.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "jobs"
        self.damaged: list[str] = []  # messages about damaged records

    def add(self, record: JobRecord) -> bool:
        """Record a new job before it is submitted; return False if its id is taken."""
        try:
            with private_files():
                self.folder.mkdir(parents=True, exist_ok=True)
                part = self.folder / f".{record.id}.{os.getpid()}"
                part.write_text(_text(record), encoding="utf-8")
                # A link fails if its name exists, on network file systems too: of two gptctl
                # only one gets the id. The pending file comes first: a half-submitted job
                # always has one.
                try:
                    os.link(part, self._pending(record))
                    os.link(part, self._file(record.id))
                except FileExistsError:
                    self._pending(record).unlink(missing_ok=True)
                    return False
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            hint = "set GPTCTL_HOME to a writable folder"
            raise UserError(
                f"cannot write job records to {self.folder}: {error.strerror}", hint, OUT_OF_REACH
            ) from None
        return True

    def accept(self, record: JobRecord) -> None:
        """Complete the record of a job that the backend has accepted."""
        # The record first: if gptctl is killed in between, the job is only settled once more.
        with private_files(), replacing(self._file(record.id)) as stream:
            stream.write(_text(record).encode())
        self._pending(record).unlink(missing_ok=True)

    def remove(self, record: JobRecord) -> None:
        """Remove what `add` created."""
        # Another gptctl may have taken the id since: its record has another token.
        with suppress(FileNotFoundError, ValueError):
            if _read(self._file(record.id)).token == record.token:
                (self.folder / f"{record.id}{ENDED}").unlink(missing_ok=True)
                self._file(record.id).unlink()
        self._pending(record).unlink(missing_ok=True)

    def holds(self, job_id: str) -> bool:
        return os.path.lexists(self._file(job_id))

    def pending(self) -> list[JobRecord]:
        """Jobs that are being submitted, or whose gptctl was killed while it submitted them."""
        found = []
        for marker in sorted(self.folder.glob("*.pending")):
            # Another gptctl may remove the file at any moment.
            with suppress(ValueError, TypeError, KeyError, OSError):
                found.append(_read(marker))
        return found

    def ids(self) -> list[str]:
        """All job ids, oldest first."""
        # By modification time: records are not written again after the submission, and opening
        # thousands of files would be slow.
        try:
            with os.scandir(self.folder) as entries:
                found = [
                    entry
                    for entry in entries
                    if entry.name.endswith(".json") and not entry.name.startswith(".")
                ]
                times = {
                    entry.name.removesuffix(".json"): entry.stat(follow_symlinks=False).st_mtime
                    for entry in found
                }
        except FileNotFoundError:
            return []
        except OSError as error:
            hint = "set GPTCTL_HOME to another folder"
            raise UserError(
                f"cannot read {self.folder}: {error.strerror}", hint, OUT_OF_REACH
            ) from None
        return sorted(times, key=lambda name: (times[name], name))

    def present_ids(self) -> list[str]:
        """The ids of jobs that `gptctl rm` has not removed, oldest first."""
        removed = {file.name.removesuffix(REMOVED) for file in self.folder.glob(f"*{REMOVED}")}
        return [job_id for job_id in self.ids() if job_id not in removed]

    def records(self, last: int | None = None) -> list[JobRecord]:
        """All jobs, or the last that were not removed, oldest first; damaged ones are moved."""
        found: list[JobRecord] = []
        for job_id in reversed(self.ids() if last is None else self.present_ids()):
            if last is not None and len(found) >= last:
                break
            if record := self._valid_record(job_id):
                found.append(record)
        return sorted(found, key=lambda record: (record.created, record.id))

    def remove_temporary_files(self) -> None:
        """Remove temporary files that a killed gptctl left behind."""
        # Writing takes milliseconds: after an hour nobody is still using the file.
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        for name in filter(
            re.compile(r"\..+\.\d+|.+\.(json|ended|removed)\.part\d+").fullmatch, names
        ):
            with suppress(OSError):
                if time.time() - (self.folder / name).stat().st_mtime > 3600:
                    (self.folder / name).unlink()

    def find(self, name: str) -> JobRecord:
        """Find a job by its id, the start or the hash of it, or by the scheduler's id."""
        if not name.strip():
            raise UserError("the job id is empty", "see `gptctl list`", WRONG_USAGE)
        ids = self._some_ids()
        matching = matching_ids(name, ids)
        found = [record for record in map(self._valid_record, matching) if record]
        # A number may be both a hash and an id of the scheduler: then it is ambiguous.
        if name.isdecimal() and name not in ids:
            known = {record.id for record in found}
            found += [
                record
                for record in self.records()
                if str(record.handle.get("scheduler_id")) == name and record.id not in known
            ]
        if len(found) == 1:
            return found[0]
        if found:
            candidates = _some([record.id for record in found])
            raise UserError(f"{name} matches several jobs", f"use one of {candidates}", WRONG_USAGE)
        ids = self.ids()  # again: damaged records have been moved away
        near = closest(name, ids)
        hint = f"did you mean {near[0]}?" if near else f"known: {_some(ids)}; see `gptctl list`"
        raise UserError(f"unknown job: {name}", hint, WRONG_USAGE)

    def latest(self, folder: str) -> JobRecord:
        """Find the latest job that was submitted from a folder, or else the latest of all."""
        self._some_ids()
        found = self.records(last=NEWEST)[::-1]
        if not found:
            hint = "`gptctl list --all` shows removed jobs"
            raise UserError("there are no jobs", hint, WRONG_USAGE)
        return next((record for record in found if folder and record.folder == folder), found[0])

    def _some_ids(self) -> list[str]:
        ids = self.ids()
        if not ids:
            raise UserError("there are no jobs yet", "submit one with `gptctl submit`", WRONG_USAGE)
        return ids

    def _valid_record(self, job_id: str) -> JobRecord | None:
        """The record, or None if it is missing or damaged."""
        try:
            return _read(self._file(job_id))
        except FileNotFoundError:
            return None  # another gptctl has just removed it
        except OSError as error:
            # gptctl writes no symbolic links, so a link is damage. Any other error, such as a
            # stale file handle, may be temporary: the record stays where it is.
            if error.errno != errno.ELOOP:
                self.damaged.append(f"{self._file(job_id)} cannot be read: {error.strerror}")
                return None
            self._set_aside(f"{job_id}.json", error)
        except (ValueError, TypeError, KeyError) as error:
            self._set_aside(f"{job_id}.json", error)
        return None

    def _file(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.json"

    def _pending(self, record: JobRecord) -> Path:
        return self.folder / f"{record.id}.{record.token}.pending"

    def _set_aside(self, name: str, error: Exception) -> None:
        """Move a damaged record away, so that it is reported once and can still be inspected."""
        aside = self.folder.parent / "damaged"
        where = ""
        with suppress(OSError), private_files():
            aside.mkdir(exist_ok=True)
            os.rename(self.folder / name, aside / f"{name}.{time.time_ns()}")
            where = f"; moved to {aside}"
        self.damaged.append(f"{self.folder / name} is damaged ({_reason(error)}){where}")


def matching_ids(name: str, ids: Sequence[str]) -> list[str]:
    """The ids that a user may mean: the id itself, or those whose start or hash is given."""
    # An exact id wins over longer ids that start with it: `gpt-3f9a2c` and `gpt-3f9a2c-2`.
    if name in ids:
        return [name]
    hashes = {job_id: found[1] for job_id in ids if (found := _HASH.search(job_id))}
    # So does an exact hash. A part of one needs some length: `ca` may be the start of a name.
    by_hash = [job_id for job_id, code in hashes.items() if code == name]
    if not by_hash and len(name) >= 4:
        by_hash = [job_id for job_id, code in hashes.items() if code.startswith(name)]
    return list(dict.fromkeys([*(each for each in ids if each.startswith(name)), *by_hash]))


def short_id(job_id: str) -> str:
    """The hash of an id, which finds the job, too; the id itself if it has none."""
    found = _HASH.search(job_id)
    return found[1] if found else job_id


def new_record(**facts: Any) -> JobRecord:
    # `rerun` plans a job as in its first folder, so the folder is that of this process.
    return JobRecord(
        created=time.time(), submitter=this_process(), folder=current_folder(), **facts
    )


def current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been deleted
        return ""


def _text(record: JobRecord) -> str:
    values = {name: _plain(value) for name, value in record._asdict().items()}
    # The key stays run_dir, as in --json and in records of older versions.
    values["run_dir"] = values.pop("local_dir")
    return json.dumps(values, indent=1) + "\n"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _read(file: Path) -> JobRecord:
    """Read and check a record of this or another version of gptctl."""
    # Neither follow a link nor block on a FIFO: such a file is reported as damaged.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        values = json.loads(os.read(descriptor, MAX_RECORD))
    finally:
        os.close(descriptor)
    values["local_dir"] = values["run_dir"]
    # Keys of a newer gptctl are ignored; keys that an older one lacks have defaults.
    known = {name: values[name] for name in JobRecord._fields if name in values}
    record = JobRecord(**known)
    wrong = [name for name in TEXT_FIELDS if not isinstance(getattr(record, name), str)]
    wrong += [
        name
        for name in ("created", "nodes", "per_node", "world", "sweep_index")
        if not _is_number(getattr(record, name))
    ]
    wrong += [
        name for name in ("submitter", "handle") if not isinstance(getattr(record, name), dict)
    ]
    # Folders are removed by these two: neither may lead elsewhere.
    wrong += [] if _is_absolute(record.local_dir) else ["run_dir"]
    wrong += [] if _is_name(record.token) else ["token"]
    wrong += [] if is_scheduler_id(record.handle.get("scheduler_id", "0")) else ["scheduler_id"]
    if wrong or not file.name.startswith(f"{record.id}."):
        raise ValueError(f"{wrong[0] if wrong else 'id'} is invalid")
    return record


def _is_absolute(path: Any) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and "\0" not in path


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and not {"/", "\0"} & set(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def _some(ids: list[str]) -> str:
    """The newest eight ids, as text."""
    return ", ".join(ids[:-9:-1]) + (", …" if len(ids) > 8 else "")
