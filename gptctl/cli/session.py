"""What one command works with: the job store, and the backends it talks to. Created by the group, passed to every verb."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import OUT_OF_REACH, UserError

if TYPE_CHECKING:
    from gptctl.backends import Backend, Backends, JobState
    from gptctl.jobs.store import JobRecord, Store
    from gptctl.logs.files import LogFiles


class Session:
    @cached_property
    def backends(self) -> Backends:
        from gptctl.backends import Backends
        from gptctl.cli import ui

        return Backends(ui.say)

    @cached_property
    def store(self) -> Store:
        """The job store, after settling what a killed gptctl may have left."""
        from gptctl.cli import ui
        from gptctl.jobs.store import Store
        from gptctl.jobs.submit import settle

        store = Store()
        for note in settle(store, self.backends):
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

    def find(self, name: str | None) -> JobRecord:
        """A job by its id; without one the latest, which is then named."""
        from gptctl.cli import ui

        try:
            record = self.store.find(name)
        finally:
            self.report_damage()
        if name is None:
            ui.say(f"job {record.id}")
        return record

    def report_damage(self) -> None:
        from gptctl.cli import ui

        for note in self.store.damaged:
            ui.say(f"note: {note}")

    def catch_up(self, record: JobRecord) -> None:
        """Copy new logs of a job on other machines here, and say what is missing."""
        from gptctl.cli import ui

        try:
            for words in self.backend_of(record).catch_up(record):
                ui.say(words)
        except UserError as error:  # what is here can be shown all the same
            ui.say(error.message)


def require_folder(record: JobRecord) -> None:
    if not record.run_folder.is_dir():
        message = f"the folder of {record.id} is missing: {record.local_dir}"
        raise UserError(message, "", OUT_OF_REACH)


def files_of(record: JobRecord) -> LogFiles:
    from gptctl.logs.local_files import LocalLogFiles

    return LocalLogFiles(Path(record.log_dir), record.run_folder)
