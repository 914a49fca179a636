"""Sweeps: many runs of one config. Which runs there are, and which job each of them has.

A sweep is one file under GPTCTL_HOME, written before its first job. The jobs name their sweep: so a
sweep whose gptctl was killed knows what was submitted.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import DamagedFile, is_time, notice, open_no_link, read_json
from gptctl.engine.typed_fields import typed
from gptctl.jobs.labels import Labels, checked_labels
from gptctl.jobs.store import NOTHING, JobRecord, Store
from gptctl.jobs.submission_order import append_to_order, in_order
from gptctl.spec.resources import home
from gptctl.spec.sweep import Run
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError, closest


class SweepRecord(NamedTuple):
    """What was submitted as one sweep."""

    id: str
    created: float
    file: str  # the sweep file
    folder: str  # where gptctl was started
    config: str
    runs: tuple[Run, ...]
    arguments: Mapping[str, Any]  # flags and overrides that were typed, for all runs
    parallel: int | None = None
    metric: str = "loss"
    goal: str = "minimize"
    # Config and options as they were, see `written.py`; empty in records of older versions.
    written: Mapping[str, Any] = NOTHING
    # Of all its runs: see `labels.py`.
    tags: Mapping[str, str] = NOTHING
    note: str = ""

    @property
    def labels(self) -> Labels:
        return Labels(self.tags, self.note)


class SweepMember(NamedTuple):
    """A run of a sweep, and its newest job; None if none was submitted."""

    number: int
    run: Run
    job: JobRecord | None


class SweepStore:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "sweeps"

    def add(self, sweep: SweepRecord) -> SweepRecord:
        """Record a new sweep under a free id."""
        try:
            with private_files():
                self.folder.mkdir(parents=True, exist_ok=True)
                sweep = sweep._replace(id=self._free_id(sweep))
                with replacing(self._file(sweep.id)) as stream:
                    mappings = {"written": dict(sweep.written), "tags": dict(sweep.tags)}
                    values = {**sweep._asdict(), **mappings}
                    stream.write(json.dumps(values, indent=1).encode() + b"\n")
        except OSError as error:
            message = f"cannot write {self.folder}: {error.strerror}"
            hint = "set GPTCTL_HOME to a writable folder"
            raise UserError(message, hint, OUT_OF_REACH) from None
        return sweep

    def _free_id(self, sweep: SweepRecord) -> str:
        text = json.dumps([sweep.config, sweep.folder, sweep.runs, sweep.arguments])
        base = f"{sweep.id}-{zlib.crc32(text.encode()) & 0xFFFFFF:06x}"
        number = 1
        while True:
            name = base if number == 1 else f"{base}-{number}"
            # Creating the file takes the name: of two gptctl only one gets it.
            with suppress(FileExistsError):
                self._file(name).open("x").close()
                append_to_order(self.folder, name)
                return name
            number += 1

    def _file(self, sweep: str) -> Path:
        return self.folder / f"{sweep}.json"

    def remove(self, sweep: SweepRecord) -> None:
        """Remove a sweep that has no jobs."""
        self._file(sweep.id).unlink(missing_ok=True)
        self._lock_file(sweep.id).unlink(missing_ok=True)

    @contextmanager
    def locked(self, sweep: SweepRecord) -> Iterator[None]:
        """Let only one gptctl submit runs of a sweep: two would submit the same ones."""
        import fcntl

        # Not truncated, and not through a link: whatever is there may be a file of the user.
        name = str(self._lock_file(sweep.id))
        try:
            lock = open_no_link(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            message = f"cannot lock {name}: {error.strerror}"
            raise UserError(message, "remove it, and try again", OUT_OF_REACH) from None
        try:
            # A killed gptctl loses the lock with its file.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                message = f"another gptctl is submitting runs of {sweep.id}"
                hint = f"see `gptctl sweep show {sweep.id}`, and try again later"
                raise UserError(message, hint, OUT_OF_REACH) from None
            yield
        finally:
            os.close(lock)

    def _lock_file(self, sweep: str) -> Path:
        return self.folder / f"{sweep}.lock"

    def all(self) -> list[SweepRecord]:
        """All sweeps, oldest first. Damaged files are left out."""
        files = self.folder.glob("*.json")
        found = [sweep for file in files if (sweep := _read(file))]
        known = {sweep.id: sweep for sweep in found}
        ids = in_order(self.folder, known, lambda name: known[name].created)
        return [known[name] for name in ids]

    def find(self, name: str | None) -> SweepRecord:
        """Find a sweep by id or unique prefix; without a name, the latest."""
        known = self.all()
        if not known:
            hint = "submit one with `gptctl sweep submit FILE`"
            raise UserError("there are no sweeps yet", hint, WRONG_USAGE)
        if name is None:
            return known[-1]
        exact = [sweep for sweep in known if sweep.id == name]
        found = exact or [sweep for sweep in known if name and sweep.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        ids = [sweep.id for sweep in found or known]
        if found:
            hint = f"use one of {', '.join(ids)}"
            raise UserError(f"{name} matches several sweeps", hint, WRONG_USAGE)
        near = closest(name, ids)
        hint = f"did you mean {near[0]}?" if near else "see `gptctl sweep list`"
        raise UserError(f"unknown sweep: {name}", hint, WRONG_USAGE)


def new_sweep(**facts: Any) -> SweepRecord:
    return SweepRecord(created=time.time(), **facts)


def _read(file: Path) -> SweepRecord | None:
    values = read_json(file)
    # Empty: another gptctl has taken the name, and writes the file in a moment.
    if values is None:
        return None
    try:
        sweep = typed(SweepRecord, {**values, "id": file.stem})
        _check(sweep)
    except DamagedFile as error:
        notice(file, str(error))
        return None
    runs = tuple({key: str(value) for key, value in run.items()} for run in sweep.runs)
    return sweep._replace(runs=runs)


def _check(sweep: SweepRecord) -> None:
    """Raise DamagedFile if a field has its type, but not its form."""
    options = sweep.arguments.get("overrides")
    is_valid = {
        "created": is_time(sweep.created),
        "parallel": sweep.parallel is None or sweep.parallel > 0,
        "overrides": isinstance(options, list)
        and all(isinstance(each, list) and len(each) == 4 for each in options),
    }
    if wrong := [name for name, valid in is_valid.items() if not valid]:
        raise DamagedFile(f"{wrong[0]} is invalid")
    checked_labels(sweep.labels.as_json())


def members(sweep: SweepRecord, store: Store) -> list[SweepMember]:
    """The runs of a sweep, each with its newest job."""
    jobs: dict[int, JobRecord] = {}
    for record in store.records():
        if record.sweep == sweep.id:
            jobs[record.sweep_index] = record
    return [SweepMember(index, run, jobs.get(index)) for index, run in enumerate(sweep.runs)]


def has_jobs(sweep: SweepRecord, store: Store) -> bool:
    """Whether a run of the sweep has a job, or one that may have been started."""
    return any(each.job for each in members(sweep, store))


def best_first(rows: Sequence[Mapping[str, Any]], goal: str) -> list[Mapping[str, Any]]:
    """Sort the rows of a sweep: the best value first, those without one last."""
    sign = -1 if goal == "maximize" else 1
    return sorted(
        rows, key=lambda row: (row["value"] is None, sign * (row["value"] or 0), row["run"])
    )
