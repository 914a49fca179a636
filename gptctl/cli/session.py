"""The job store and the backends of one command. The group creates a Session for the verb."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint_names import METRICS
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.backends import Backend, Backends, JobState
    from gptctl.deadline import Deadline
    from gptctl.jobs.store import JobRecord, Store
    from gptctl.logs.files import LogFiles

# Of the time that a command has. The rest is for what hosts said: an error that names the host must
# arrive before the command stops waiting.
SHARE_OF_HOSTS = 0.8


class Session:
    def __init__(self) -> None:
        self._limit: Deadline | None = None

    def end_within(self, seconds: float) -> Deadline:
        """Let no other machine keep this command waiting for longer; call it first."""
        from gptctl.deadline import Deadline

        self._limit = Deadline(SHARE_OF_HOSTS * seconds)
        return Deadline(seconds)

    # Both are created when first used: `gptctl keys` needs neither the store nor a backend.
    @cached_property
    def backends(self) -> Backends:
        from gptctl.backends import Backends
        from gptctl.cli import ui

        return Backends(ui.say, self._limit)

    @cached_property
    def store(self) -> Store:
        """Open the job store, and clean up after any gptctl that was killed during a submit."""
        from gptctl.cli import ui
        from gptctl.jobs.store import Store

        # Before any verb reads it: a half-submitted job must not be listed or chosen as the latest.
        store = Store()
        store.remove_temporary_files()
        if store.has_pending():
            # Imported here: it loads half of gptctl, and most stores have nothing half-submitted.
            from gptctl.jobs.submit import finish_interrupted_submits

            for note in finish_interrupted_submits(store, self.backends):
                ui.say(f"note: {note}")
        return store

    def backend_of(self, record: JobRecord) -> Backend:
        return self.backends.of(record.kind)

    def state_of(self, record: JobRecord) -> JobState:
        from gptctl.jobs.state import state_of

        return state_of(record, self.backends)

    def is_over(self, record: JobRecord) -> bool:
        from gptctl.jobs.state import is_final

        return is_final(self.state_of(record))

    def find(self, name: str | None, announce: bool = True) -> JobRecord:
        """Find a job by its id. Without one, take the latest of this folder, and print its id."""
        from gptctl.cli import ui
        from gptctl.jobs.store import current_folder

        folder = current_folder()
        try:
            record = self.store.latest(folder) if name is None else self.store.find(name)
        finally:  # damaged records may be the reason why a job is not found
            self.report_damage()
        # The user must see which job was chosen. One of another folder is named in any case.
        is_elsewhere = record.folder != folder
        if name is None and (announce or is_elsewhere):
            where = " (the latest job; none was submitted from this folder)" if is_elsewhere else ""
            ui.say(f"job {record.id}{where}")
        return record

    def run_or_file(self, name: str | None) -> JobRecord | Path:
        """Find a job as `find` does; a name may also be the path of a file with metrics."""
        if name is not None and os.path.isfile(name):
            return Path(name)
        if name is not None and "/" in name:
            hint = "give a job, or the path of a metrics.jsonl or log file"
            what = "does not exist"
            if os.path.isdir(name):
                what, file = "is a folder", os.path.join(name, METRICS)
                hint = f"give the file: {file}" if os.path.isfile(file) else hint
            elif os.path.exists(name):
                what = "is not a regular file"
            raise UserError(f"{name} {what}", hint, WRONG_USAGE)
        return self.find(name)

    def report_damage(self) -> None:
        from gptctl.cli import ui

        for note in self.store.damaged:
            ui.say(f"note: {note}")

    def catch_up(self, record: JobRecord) -> None:
        """Copy new log lines from other hosts to this machine, and report what is missing."""
        from gptctl.cli import ui

        # Without the folder there is nowhere to copy to.
        if not record.run_folder.is_dir():
            return
        try:
            for words in self.backend_of(record).catch_up(record):
                ui.say(words)
        # A warning, not an error: the verb can still show what was copied before.
        except UserError as error:
            ui.say(error.message)


def require_folder(record: JobRecord) -> None:
    # Users delete run folders to free space; the record in the store remains.
    if record.run_folder.is_dir():
        return
    from gptctl.jobs.history import missing_folder

    raise missing_folder(record)


def files_of(record: JobRecord) -> LogFiles:
    from gptctl.logs.local_files import LocalLogFiles

    # Always local: backends copy remote logs to this folder, so readers need no network.
    return LocalLogFiles(Path(record.log_dir), record.run_folder)
