"""Help the engine of a job to notify people, while a command watches the job.

It helps where nodes have no way out, and if the engine is killed: see `engine/notifier.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptctl.backends import JobState
from gptctl.engine.contract import PLAN
from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.jobs.state import is_final
from gptctl.jobs.store import JobRecord
from gptctl.reporting import Say

if TYPE_CHECKING:
    from gptctl.engine.notifier import Notifier

LAST_WORD = 20.0  # seconds that a command stays to send the last messages


@contextmanager
def notifying(record: JobRecord, state_of: Callable[[], JobState], say: Say) -> Iterator[None]:
    """Send messages that the engine of the job does not send, until the command ends."""
    notifier = _notifier(record, say)
    if not notifier:
        yield
        return
    notifier.start()
    try:
        yield
        # After Ctrl-C nobody wants to wait; the job is running, and its engine tells the rest.
        state = state_of()
        if is_final(state):
            if not RunFolder(record.local_dir).result():
                notifier.end_as(state.state, state.reason)
            notifier.close(LAST_WORD)
    finally:
        notifier.close(0)


def has_open_news(record: JobRecord) -> bool:
    """Whether a job that has ended may have messages that its engine could not send."""
    notifier = _notifier(record, lambda text: None)
    return notifier is not None and notifier.has_open_news()


def _notifier(record: JobRecord, say: Say) -> Notifier | None:
    try:
        # Of a job that was removed, or that a newer gptctl submitted, nothing can be told.
        plan = read_plan(record.run_folder) if (record.run_folder / PLAN).exists() else None
    except DamagedFile:
        plan = None
    if not plan or not plan.notify:
        return None
    # Imported late: most jobs notify nobody.
    from gptctl.engine.deliveries import WATCHER
    from gptctl.engine.notifier import Notifier, View

    is_copy = record.local_dir != plan.remote_dir
    view = View(record.run_folder, record.output_dir, WATCHER, is_copy)
    return Notifier(plan, view, os.environ, say)
