"""The job store: one JSON file per job under GPTCTL_HOME, written whole or not at all, safe under many gptctl at once.

A record says what was submitted and where it lives. How the job stands is never stored here: `state.py` asks.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gptctl.processes import this_process
from trainer.durable import replacing
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
    run_dir: str
    log_dir: str
    nodes: int
    per_node: int
    world: int
    config: str = ""
    output_dir: str = ""  # of the bundled trainer
    submitter: Mapping[str, Any] = NOTHING  # the gptctl that made it
    token: str = ""  # tells its own half-made folder from another's
    handle: Mapping[str, Any] = NOTHING  # what the backend knows it by; empty until it has accepted the job
    schema: int = SCHEMA

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir)


def home() -> Path:
    if chosen := os.environ.get("GPTCTL_HOME"):
        return Path(chosen).absolute()
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "gptctl"


@contextmanager
def private_files() -> Iterator[None]:
    """What is made in here is for the user alone: folders 0700, files 0600."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class Store:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "jobs"

    def add(self, record: JobRecord) -> bool:
        """Journals a new job; False when its id is taken. The link makes it exclusive, on network file systems too."""
        try:
            with private_files():
                self.folder.mkdir(parents=True, exist_ok=True)
                part = self.folder / f".{record.id}.{os.getpid()}"
                part.write_text(_text(record), encoding="utf-8")
                try:
                    os.link(part, self._file(record.id))
                except FileExistsError:
                    return False
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            hint = "set GPTCTL_HOME to a folder that can be written to"
            raise UserError(f"cannot keep job records in {self.folder}: {error.strerror}", hint, OUT_OF_REACH) from None
        return True

    def replace(self, record: JobRecord) -> None:
        with private_files(), replacing(self._file(record.id)) as stream:
            stream.write(_text(record).encode())

    def remove(self, record: JobRecord) -> None:
        self._file(record.id).unlink(missing_ok=True)

    def holds(self, job_id: str) -> bool:
        return self._file(job_id).exists()

    def records(self) -> tuple[list[JobRecord], list[str]]:
        """All jobs, oldest first, and the damaged files, which are set aside."""
        records, damaged = [], []
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        for name in names:
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                records.append(_read(self.folder / name))
            except FileNotFoundError:
                continue  # another gptctl has just taken it away
            except (ValueError, TypeError, KeyError, OSError) as error:
                damaged.append(self._set_aside(name, error))
        return sorted(records, key=lambda record: (record.created, record.id)), damaged

    def tidy(self) -> None:
        """Removes what a gptctl that was killed had begun to write; nobody writes for an hour."""
        for file in [*self.folder.glob(".*"), *self.folder.glob("*.part*")]:
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > 3600:
                    file.unlink()

    def find(self, name: str | None) -> JobRecord:
        """By id, unique prefix or the scheduler's id; without a name the latest."""
        records, _ = self.records()
        if not records:
            raise UserError("there are no jobs yet", "gptctl submit", WRONG_USAGE)
        if name is None:
            return records[-1]
        exact = [record for record in records if name in (record.id, str(record.handle.get("scheduler_id", "")))]
        found = exact or [record for record in records if record.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"{name} is not the id of one job", f"one of {_some(found)}", WRONG_USAGE)
        near = closest(name, [record.id for record in records])
        hint = f"did you mean {near[0]}?" if near else f"known: {_some(records)}; `gptctl list` shows all"
        raise UserError(f"there is no job {name}", hint, WRONG_USAGE)

    def _file(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.json"

    def _set_aside(self, name: str, error: Exception) -> str:
        """A damaged record is kept, but not met again."""
        aside = self.folder.parent / "damaged"
        with suppress(OSError), private_files():
            aside.mkdir(exist_ok=True)
            os.rename(self.folder / name, aside / f"{name}.{time.time_ns()}")
        return f"{self.folder / name} is damaged ({_reason(error)}); it is now in {aside}"


def new_record(**facts: Any) -> JobRecord:
    return JobRecord(created=time.time(), submitter=this_process(), **facts)


def _text(record: JobRecord) -> str:
    return json.dumps({name: _plain(value) for name, value in record._asdict().items()}, indent=1) + "\n"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _read(file: Path) -> JobRecord:
    """What a newer gptctl added is ignored, what an older one lacked has its default."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        values = json.loads(stream.read(MAX_RECORD))
    known = {name: values[name] for name in JobRecord._fields if name in values}
    record = JobRecord(**known)
    wrong = [
        name for name in ("id", "name", "run_dir", "log_dir", "kind") if not isinstance(getattr(record, name), str)
    ]
    wrong += [name for name in ("created", "nodes", "per_node", "world") if not _is_number(getattr(record, name))]
    wrong += [name for name in ("submitter", "handle") if not isinstance(getattr(record, name), dict)]
    if wrong or f"{record.id}.json" != file.name:
        raise ValueError(f"its {wrong[0] if wrong else 'id'} makes no sense")
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def _some(records: list[JobRecord]) -> str:
    newest = [record.id for record in reversed(records)][:8]
    return ", ".join(newest) + (", …" if len(records) > 8 else "")
