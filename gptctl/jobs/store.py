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
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import NO_FILE, DamagedFile, is_time, load_json, open_no_link
from gptctl.engine.processes import this_process
from gptctl.engine.run_folder import is_scheduler_id
from gptctl.engine.typed_fields import typed
from gptctl.jobs.submission_order import append_to_order, in_order
from gptctl.spec.resources import home
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError, closest
from trainer.named_tuple import NamedTuple

SCHEMA = 1
PENDING = ".pending"  # marks the record of a job that its backend has not accepted yet
# Files beside the record of a job: see `history.py`, `labels.py` and `costs.py`.
ENDED, REMOVED, LABELS, COSTS = ".ended", ".removed", ".labels", ".costs"
NEWEST = 500  # records that are searched for the latest job of a folder: opening all may be slow
ABANDONED = 3600.0  # seconds: no gptctl takes that long to write a temporary file
MAX_RECORD = 1 << 20  # bytes that are read of a record: a damaged one may be of any size
_HASH = re.compile(r"-([0-9a-f]{6}(?:-\d+)?)$")  # of `gpt-3f9a2c` and `gpt-3f9a2c-2`
_COMPLETE = re.compile(r"(^|-)[0-9a-f]{6}(-\d+)?$")  # an id or a hash, not only the start of one
_TEMPORARY = re.compile(r"\..+\.\d+|.+\.(json|ended|removed|labels|costs)\.part\d+")
_SET_ASIDE = re.compile(r"(.+)\.json\.\d+")  # a damaged record, with the time when it was moved
NOTHING: Mapping[str, Any] = MappingProxyType({})


LONGEST_TEXT = 4096  # characters; also the longest path of Linux
MOST_RANKS = 10_000_000  # more than any cluster has: counting to a larger number would take forever
MOST = {"nodes": 1 << 16, "per_node": 1 << 10, "world": MOST_RANKS}
PATHS = ("local_dir", "log_dir", "output_dir", "remote_dir", "array_dir", "folder")


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
    rerun_of: str = ""  # id of the job whose folder it was prepared from
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
        # Records that need not be read: their files are as they were.
        self.known: Mapping[str, JobRecord] = NOTHING

    def add(self, record: JobRecord) -> bool:
        """Record a new job before it is submitted; return False if its id is taken."""
        try:
            with private_files():
                self.folder.mkdir(parents=True, exist_ok=True)
                part = self.folder / f".{record.id}.{os.getpid()}"
                part.write_text(_text(record), encoding="utf-8")
                # Before its record: a line without one is harmless.
                append_to_order(self.folder, record.id)
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
        # Another gptctl may have taken the id since: its record has another token. A damaged one
        # is set aside by whoever reads it next.
        with suppress(OSError, DamagedFile):
            if _read(self._file(record.id)).token == record.token:
                for suffix in (ENDED, LABELS):
                    (self.folder / f"{record.id}{suffix}").unlink(missing_ok=True)
                self._file(record.id).unlink()
        self._pending(record).unlink(missing_ok=True)

    def holds(self, job_id: str) -> bool:
        return os.path.lexists(self._file(job_id))

    def pending(self) -> list[JobRecord]:
        """Jobs that are being submitted, or whose gptctl was killed while it submitted them."""
        return [record for name in self._named(PENDING) if (record := self._valid_record(name))]

    def has_pending(self) -> bool:
        return bool(self._named(PENDING))

    def _named(self, suffix: str) -> list[str]:
        """The files with this suffix, by name."""
        try:
            return sorted(name for name in os.listdir(self.folder) if name.endswith(suffix))
        except OSError:  # missing, or `ids` says why it cannot be read
            return []

    def ids(self) -> list[str]:
        """All job ids, oldest first."""
        # Those of older versions by modification time: records are not written again after the
        # submission, and opening thousands of files would be slow.
        try:
            with os.scandir(self.folder) as entries:
                files = {
                    entry.name.removesuffix(".json"): entry
                    for entry in entries
                    if entry.name.endswith(".json") and not entry.name.startswith(".")
                }
        except FileNotFoundError:
            return []
        except OSError as error:
            hint = "set GPTCTL_HOME to another folder"
            raise UserError(
                f"cannot read {self.folder}: {error.strerror}", hint, OUT_OF_REACH
            ) from None
        return in_order(self.folder, files, lambda name: _changed(files[name]))

    def present_ids(self) -> list[str]:
        """The ids of jobs that `gptctl rm` has not removed, oldest first."""
        removed = {name.removesuffix(REMOVED) for name in self._named(REMOVED)}
        return [job_id for job_id in self.ids() if job_id not in removed]

    def records(self, last: int | None = None) -> list[JobRecord]:
        """All jobs, or the last that were not removed, oldest first; damaged ones are moved."""
        if last is None:
            return self.records_of(self.ids())
        found: list[JobRecord] = []
        for job_id in reversed(self.present_ids()):
            if len(found) >= last:
                break
            if record := self._valid_record(f"{job_id}.json"):
                found.append(record)
        return found[::-1]

    def records_of(self, ids: Sequence[str]) -> list[JobRecord]:
        read = (self.known.get(each) or self._valid_record(f"{each}.json") for each in ids)
        return [record for record in read if record]

    def remove_temporary_files(self) -> None:
        """Remove temporary files that a killed gptctl left behind."""
        # Writing takes milliseconds: after an hour nobody is still using the file.
        try:
            names = os.listdir(self.folder)
        except OSError:  # missing, or `ids` says why it cannot be read
            return
        # By their last character first: almost all names are those of records.
        numbered = [name for name in names if name[-1].isdigit()]
        for name in filter(_TEMPORARY.fullmatch, numbered):
            with suppress(OSError):
                # Whatever the clock says: not those of a process that may be writing.
                is_old = time.time() - (self.folder / name).stat().st_mtime > ABANDONED
                if is_old and not os.path.exists(f"/proc/{_pid_in(name)}"):
                    (self.folder / name).unlink()

    def find(self, name: str) -> JobRecord:
        """Find a job by its id, the start or the hash of it, or by the scheduler's id."""
        if not name.strip():
            raise UserError("the job id is empty", "see `gptctl list`", WRONG_USAGE)
        if not self.ids():
            self._refuse_damaged(name)
        ids = self._some_ids()
        matching = matching_ids(name, ids)
        files = [f"{job_id}.json" for job_id in matching]
        found = [record for record in map(self._valid_record, files) if record]
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
        self._refuse_damaged(name)
        ids = self.ids()  # again: damaged records have been moved away
        near = closest(name, ids)
        hint = f"did you mean {near[0]}?" if near else f"known: {_some(ids)}; see `gptctl list`"
        raise UserError(f"unknown job: {name}", hint, WRONG_USAGE)

    def _refuse_damaged(self, name: str) -> None:
        """Raise UserError if the record of this job was moved away, now or earlier."""
        try:
            names = sorted(os.listdir(self._aside))  # by time: of two of a job the newer one counts
        except OSError:  # no record was ever damaged
            return
        files = {found[1]: each for each in names if (found := _SET_ASIDE.fullmatch(each))}
        matching = matching_ids(name, list(files))
        if len(matching) == 1:
            job_id = matching[0]
            raise UserError(
                f"the record of {job_id} is damaged: it was moved to {self._aside / files[job_id]}",
                f"the files of the job are still in its run folder, which is called {job_id}",
                WRONG_USAGE,
            )

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

    def _valid_record(self, name: str) -> JobRecord | None:
        """The record in a file, or None if it is missing or damaged."""
        try:
            return _read(self.folder / name)
        except DamagedFile as error:
            self._set_aside(name, str(error))
        except OSError as error:
            # Missing: another gptctl has just removed it. Any other error, such as a stale file
            # handle, may be temporary: the record stays where it is.
            if error.errno in NO_FILE:
                self._set_aside(name, "not a regular file")
            elif error.errno != errno.ENOENT:
                self.damaged.append(f"{self.folder / name} cannot be read: {error.strerror}")
        return None

    @property
    def _aside(self) -> Path:
        return self.folder.parent / "damaged"

    def _file(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.json"

    def _pending(self, record: JobRecord) -> Path:
        return self.folder / f"{record.id}.{record.token}{PENDING}"

    def _set_aside(self, name: str, reason: str) -> None:
        """Move a damaged record away, so that it is reported once and can still be inspected."""
        where = ""
        with suppress(OSError), private_files():
            self._aside.mkdir(exist_ok=True)
            os.rename(self.folder / name, self._aside / f"{name}.{time.time_ns()}")
            where = f"; moved to {self._aside}"
        self.damaged.append(f"{self.folder / name} is damaged ({reason}){where}")


def _pid_in(name: str) -> str:
    """The process that a temporary file is named after."""
    return re.sub(r".*\D", "", name)


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
    alike = list(dict.fromkeys([*(each for each in ids if each.startswith(name)), *by_hash]))
    if not _COMPLETE.search(name):
        return alike
    # The record of a complete id may be lost or damaged. Its neighbours are other jobs: `gptctl rm
    # gpt-3f9a2c` must never remove gpt-3f9a2c-2.
    neighbour = re.compile(rf"{re.escape(name)}-?\d+$")
    return [each for each in alike if not neighbour.search(each)]


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
    """Read a record of this or another version of gptctl; raise OSError or DamagedFile."""
    # gptctl writes no links here: one is damage.
    values = load_json(file, MAX_RECORD, open_no_link)
    # Every version has written these, and a job without them looks half-submitted.
    if missing := {"handle", "submitter"} - values.keys():
        raise DamagedFile(f"{', '.join(sorted(missing))} is missing")
    # Keys of a newer gptctl are ignored; keys that an older one lacks have defaults.
    record = typed(JobRecord, {**values, "local_dir": values.get("run_dir")})
    for name, is_valid in _rules(record).items():
        if not is_valid:
            raise DamagedFile(f"{name} is invalid")
    if file.name not in (f"{record.id}.json", f"{record.id}.{record.token}{PENDING}"):
        raise DamagedFile("id is invalid")
    return record


def _rules(record: JobRecord) -> dict[str, bool]:
    """What must hold for each field, besides its type."""
    values = record._asdict()
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    rules = {name: _is_text(text) for name, text in texts.items()}
    rules |= {name: rules[name] and _is_path(texts[name]) for name in PATHS}
    # Folders are removed by these two: neither may lead elsewhere.
    rules["run_dir"] = rules.pop("local_dir") and _is_folder_of(record)
    rules["token"] = rules["token"] and "/" not in record.token
    rules["created"] = is_time(record.created)
    rules |= {name: 1 <= values[name] <= most for name, most in MOST.items()}
    rules["sweep_index"] = 0 <= record.sweep_index <= MOST_RANKS
    rules["scheduler_id"] = is_scheduler_id(record.handle.get("scheduler_id", "0"))
    return rules


def _is_text(text: str) -> bool:
    return len(text) <= LONGEST_TEXT and not any(character < " " for character in text)


def _is_path(path: str) -> bool:
    return not path or os.path.isabs(path)


def _is_folder_of(record: JobRecord) -> bool:
    return bool(record.id) and os.path.basename(record.local_dir) == record.id


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:  # another gptctl has just removed it
        return 0.0


def _some(ids: list[str]) -> str:
    """The newest eight ids, as text."""
    return ", ".join(ids[:-9:-1]) + (", …" if len(ids) > 8 else "")
