"""The job store: one JSON file per job under GPTCTL_HOME, written whole or not at all, safe under many gptctl at once.

A record says what was submitted and where it lives. How the job stands is never stored here: its backend is asked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Mapping
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
MAX_RECORD = 1 << 20
NOTHING: Mapping[str, Any] = MappingProxyType({})


class JobRecord(NamedTuple):
    id: str
    name: str
    created: float
    cluster: str
    kind: str
    local_dir: str  # its folder on this machine; in its file and in --json: run_dir
    log_dir: str
    nodes: int
    per_node: int
    world: int
    config: str = ""
    output_dir: str = ""  # of the bundled trainer
    submitter: Mapping[str, Any] = NOTHING  # the gptctl that made it
    token: str = ""  # tells its own half-made folder from another's
    handle: Mapping[str, Any] = (
        NOTHING  # what the backend knows it by; empty until it has accepted the job
    )
    schema: int = SCHEMA

    @property
    def run_folder(self) -> Path:
        return Path(self.local_dir)


class Store:
    """By a record `<id>.json` stands `<id>.<token>.pending` until the backend has the job: what a killed gptctl left
    is found without reading all records."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "jobs"
        self.damaged: list[str] = []  # what was set aside, in words

    def add(self, record: JobRecord) -> bool:
        """Journals a new job; False when its id is taken. The link makes it exclusive, on network file systems too."""
        try:
            with private_files():
                self.folder.mkdir(parents=True, exist_ok=True)
                part = self.folder / f".{record.id}.{os.getpid()}"
                part.write_text(_text(record), encoding="utf-8")
                try:
                    os.link(part, self._pending(record))
                    os.link(part, self._file(record.id))
                except FileExistsError:
                    self._pending(record).unlink(missing_ok=True)
                    return False
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            hint = "set GPTCTL_HOME to a folder that can be written to"
            raise UserError(
                f"cannot keep job records in {self.folder}: {error.strerror}", hint, OUT_OF_REACH
            ) from None
        return True

    def accept(self, record: JobRecord) -> None:
        """The job exists: its record is complete."""
        with private_files(), replacing(self._file(record.id)) as stream:
            stream.write(_text(record).encode())
        self._pending(record).unlink(missing_ok=True)

    def remove(self, record: JobRecord) -> None:
        """Takes back what `add` made; the id may be another's by now."""
        with suppress(FileNotFoundError, ValueError):
            if _read(self._file(record.id)).token == record.token:
                self._file(record.id).unlink()
        self._pending(record).unlink(missing_ok=True)

    def holds(self, job_id: str) -> bool:
        return os.path.lexists(self._file(job_id))

    def pending(self) -> list[JobRecord]:
        """Jobs that are being submitted, or whose gptctl did not come to an end with it."""
        found = []
        for marker in sorted(self.folder.glob("*.pending")):
            with suppress(ValueError, TypeError, KeyError, OSError):
                found.append(_read(marker))
        return found

    def ids(self) -> list[str]:
        """Oldest first. A record is written when its job is submitted, and not again."""
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

    def records(self, last: int | None = None) -> list[JobRecord]:
        """The last so many jobs, or all, oldest first; damaged records are set aside."""
        found: list[JobRecord] = []
        for job_id in reversed(self.ids()):
            if last is not None and len(found) >= last:
                break
            if record := self._sound(job_id):
                found.append(record)
        return sorted(found, key=lambda record: (record.created, record.id))

    def tidy(self) -> None:
        """Removes what a gptctl that was killed had begun to write; nobody writes for an hour."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        for name in filter(re.compile(r"\..+\.\d+|.+\.json\.part\d+").fullmatch, names):
            with suppress(OSError):
                if time.time() - (self.folder / name).stat().st_mtime > 3600:
                    (self.folder / name).unlink()

    def find(self, name: str | None) -> JobRecord:
        """By id, unique prefix or the scheduler's id; without a name the latest."""
        if name is not None and not name.strip():
            raise UserError("the id of the job is empty", "`gptctl list` shows all", WRONG_USAGE)
        ids = self.ids()
        if not ids:
            raise UserError("there are no jobs yet", "gptctl submit", WRONG_USAGE)
        if name is None:
            return self.records(last=1)[0]
        matching = [name] if name in ids else [job_id for job_id in ids if job_id.startswith(name)]
        found = [record for record in map(self._sound, matching) if record]
        if not found and name.isdecimal():
            found = [
                record
                for record in self.records()
                if str(record.handle.get("scheduler_id")) == name
            ]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"{name} is not the id of one job", f"one of {_some(matching)}", WRONG_USAGE
            )
        ids = self.ids()  # without what was set aside
        near = closest(name, ids)
        hint = (
            f"did you mean {near[0]}?" if near else f"known: {_some(ids)}; `gptctl list` shows all"
        )
        raise UserError(f"there is no job {name}", hint, WRONG_USAGE)

    def _sound(self, job_id: str) -> JobRecord | None:
        """The record, unless it has gone or is damaged."""
        try:
            return _read(self._file(job_id))
        except FileNotFoundError:
            return None  # another gptctl has just taken it away
        except OSError as error:
            if (
                error.errno != errno.ELOOP
            ):  # a link is none of ours; anything else may be over in a moment
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
        """A damaged record is kept, but not met again."""
        aside = self.folder.parent / "damaged"
        where = ""
        with suppress(OSError), private_files():
            aside.mkdir(exist_ok=True)
            os.rename(self.folder / name, aside / f"{name}.{time.time_ns()}")
            where = f"; it is now in {aside}"
        self.damaged.append(f"{self.folder / name} is damaged ({_reason(error)}){where}")


def new_record(**facts: Any) -> JobRecord:
    return JobRecord(created=time.time(), submitter=this_process(), **facts)


def _text(record: JobRecord) -> str:
    values = {name: _plain(value) for name, value in record._asdict().items()}
    values["run_dir"] = values.pop("local_dir")
    return json.dumps(values, indent=1) + "\n"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _read(file: Path) -> JobRecord:
    """What a newer gptctl added is ignored, what an older one lacked has its default."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        values = json.loads(os.read(descriptor, MAX_RECORD))
    finally:
        os.close(descriptor)
    values["local_dir"] = values["run_dir"]
    known = {name: values[name] for name in JobRecord._fields if name in values}
    record = JobRecord(**known)
    wrong = [
        name
        for name in ("id", "name", "local_dir", "log_dir", "kind")
        if not isinstance(getattr(record, name), str)
    ]
    wrong += [
        name
        for name in ("created", "nodes", "per_node", "world")
        if not _is_number(getattr(record, name))
    ]
    wrong += [
        name for name in ("submitter", "handle") if not isinstance(getattr(record, name), dict)
    ]
    wrong += [] if is_scheduler_id(record.handle.get("scheduler_id", "0")) else ["scheduler_id"]
    if wrong or not file.name.startswith(f"{record.id}."):
        raise ValueError(f"its {wrong[0] if wrong else 'id'} makes no sense")
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def _some(ids: list[str]) -> str:
    """The newest of them."""
    return ", ".join(ids[:-9:-1]) + (", …" if len(ids) > 8 else "")
