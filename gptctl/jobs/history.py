"""How jobs ended, kept beside their records: run folders are deleted to free space.

`<id>.ended` holds the final state and what the run folder told about it, `<id>.removed` when
`gptctl rm` removed the folder. Neither is part of the record, whose file is written once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import DamagedFile, is_time, notice, read_json
from gptctl.engine.job_result import FINAL
from gptctl.engine.run_folder import RunFolder
from gptctl.engine.typed_fields import check_fields
from gptctl.jobs.store import ENDED, REMOVED, JobRecord
from gptctl.spec.resources import home
from gptctl.text import clock_time
from trainer.errors import OUT_OF_REACH, UserError

# The types of what is kept: verbs calculate with it, and show it.
FACTS = {
    "attempts": int,
    "hosts": tuple[str, ...],
    "endpoint": str,
    "ended": float | None,
    "exit_codes": Mapping[str, int],
    "stopped_nodes": tuple[int, ...],
    "not_ended": tuple[str, ...],
    "trainer": Mapping[str, Any] | None,
    "duration": float | None,
    "progress": Mapping[str, Any] | None,
}
PROGRESS = {
    "step": int,
    "total": int | None,
    "percent": int | None,
    "loss": float | None,
    "valid_loss": float | None,
    "tokens_per_second": float | None,
    "seconds_per_step": float | None,
    "seconds_left": float | None,
    "updated": float,
}


class History:
    """Reads and writes the two files of each job."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "jobs"

    def keep(self, record: JobRecord, state: Mapping[str, Any]) -> None:
        """Keep the final state of a job, unless it is kept already."""
        kept = self._read(record)
        if kept is not None and kept.get("state") == dict(state):
            return
        # A job that is not in this store has no history here.
        if not self._file(record, ".json").exists():
            return
        # Imported here: a submit, which keeps no facts, would pay for reading logs.
        from gptctl.jobs.training_progress import progress_facts

        told = facts_of(record) | progress_facts(record, str(state.get("state")), time.time())
        facts = {"token": record.token, "state": dict(state), "facts": told}
        # A home that is read-only or full must not keep gptctl from showing the state.
        with suppress(OSError), private_files(), replacing(self._file(record, ENDED)) as stream:
            stream.write(json.dumps(facts).encode() + b"\n")

    def forget(self, record: JobRecord) -> None:
        """Drop a state that was not final after all: Slurm may have requeued the job."""
        with suppress(OSError):
            self._file(record, ENDED).unlink()

    def state(self, record: JobRecord) -> dict[str, Any] | None:
        """Return the fields of the kept state, or None if none is kept."""
        found = (self._read(record) or {}).get("state")
        return found if isinstance(found, dict) and found.get("state") in FINAL else None

    def facts(self, record: JobRecord) -> dict[str, Any]:
        """Return what the run folder told when the job was seen to have ended."""
        found = (self._read(record) or {}).get("facts")
        return found if isinstance(found, dict) else {}

    def _check(self, file: Path, found: Mapping[str, Any]) -> bool:
        """Whether all that is kept has its type; what does not is noticed."""
        kept, progress = found.get("facts"), None
        try:
            check_fields(found, {"state": Mapping[str, Any], "facts": Mapping[str, Any]})
            check_fields(kept or {}, FACTS)
            ended = (kept or {}).get("ended")
            if ended is not None and not is_time(ended):
                raise DamagedFile("ended is invalid")
            progress = (kept or {}).get("progress")
            check_fields(progress or {}, PROGRESS)
        except DamagedFile as error:
            notice(file, str(error))
            return False
        return progress is None or set(PROGRESS) <= set(progress)

    def mark_removed(self, record: JobRecord, moment: float) -> None:
        facts = {"token": record.token, "removed": moment}
        with private_files(), replacing(self._file(record, REMOVED)) as stream:
            stream.write(json.dumps(facts).encode() + b"\n")

    def removed(self, record: JobRecord) -> float | None:
        """Return when `gptctl rm` removed the job's folder, or None if it did not."""
        found = read_json(self._file(record, REMOVED)) or {}
        moment = found.get("removed")
        return moment if found.get("token") == record.token and is_time(moment) else None

    def _read(self, record: JobRecord) -> dict[str, Any] | None:
        file = self._file(record, ENDED)
        found = read_json(file)
        # The id may have belonged to a job that was never started.
        is_own = found is not None and found.get("token") == record.token
        return found if found and is_own and self._check(file, found) else None

    def _file(self, record: JobRecord, suffix: str) -> Path:
        return self.folder / f"{record.id}{suffix}"


def missing_folder(record: JobRecord, hint: str = "") -> UserError:
    """The error for a job whose folder is needed and missing, with the time of its removal."""
    message = f"the folder of {record.id} is missing: {record.local_dir}"
    if removed := History().removed(record):
        message = f"the folder of {record.id} was removed {clock_time(removed)}"
    return UserError(
        message, hint or f"`gptctl status {record.id}` shows what is known", OUT_OF_REACH
    )


def facts_of(record: JobRecord) -> dict[str, Any]:
    """Read from the run folder what `gptctl status` shows besides the state."""
    # Imported here: it loads all that finds the first failure, which a submit does not need.
    from gptctl.engine.attempt_outcome import exits_and_stopped
    from gptctl.jobs.training_progress import trainer_status

    folder = RunFolder(record.local_dir)
    attempt = folder.attempts() - 1  # the latest; -1 before the first has started
    result = folder.result()
    unrecorded, stopped = exits_and_stopped(folder, attempt)
    # What the nodes recorded, else what gptctl saw.
    codes = {**unrecorded, **folder.exit_codes(attempt, range(record.nodes))}
    return {
        "attempts": folder.attempts(),
        "hosts": folder.hosts(attempt),
        "endpoint": folder.endpoint(),
        "ended": result.ended if result else None,
        "exit_codes": dict(sorted(codes.items())),
        "stopped_nodes": stopped,
        "not_ended": folder.not_ended(),
        "trainer": trainer_status(record),
    }
