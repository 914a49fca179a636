"""Following a job until it ends: its lines, how it stands meanwhile, and how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gptctl.cli.logs import files_of, say_what_is_missing
from gptctl.cli.options import INTERRUPTED

if TYPE_CHECKING:
    from gptctl.jobs.store import JobRecord
    from gptctl.logs.files import Wanted
    from gptctl.logs.stream import Lines


class Watched:
    """A job that is waited for: says how it stands while it is not running, and when that changes."""

    def __init__(self, record: JobRecord, say: Callable[[str], None]) -> None:
        self._record, self._say, self._said = record, say, ""

    def is_over(self) -> bool:
        from gptctl.engine.run_folder import RUNNING
        from gptctl.jobs import report as job_report

        state = job_report.state_of(self._record)
        if job_report.is_final(state):
            return True
        words = str(state).partition(", expected")[0]  # which is another moment in every answer
        if words != self._said and (self._said or state.state != RUNNING):
            self._said = words
            self._say(f"{self._record.id}: {state}")
        return False


def follow_job(record: JobRecord, wanted: Wanted, lines: Lines, style: Any = "text") -> int:
    """Until the job ends; its verdict. On a terminal the training's progress stands below the lines."""
    from gptctl.backends import backend_of
    from gptctl.cli import ui
    from gptctl.engine.run_folder import FAILED
    from gptctl.jobs import report as job_report
    from gptctl.logs.progress import ProgressLine
    from gptctl.logs.show import Printer
    from gptctl.logs.stream import follow

    sys.stdout.flush()
    out = sys.stdout.buffer
    printer: Any = Printer(out, style, say=ui.say)
    if style == "text" and out.isatty() and os.environ.get("TERM") != "dumb":
        printer = ProgressLine(printer, out, job_report.max_steps(record))
    watched = Watched(record, printer.say)
    try:
        with backend_of(record.kind).following(record):
            follow(files_of(record), wanted, lines, printer, watched.is_over)
    except KeyboardInterrupt:
        ui.say(job_report.goes_on(record))
        return INTERRUPTED
    finally:
        if isinstance(printer, ProgressLine):
            printer.close()
    say_what_is_missing(record)
    state = job_report.state_of(record)
    ui.say(f"{record.id}: {state}")
    if state.state == FAILED:
        ui.say(f"hint: gptctl logs {record.id} --failed")
    return job_report.verdict(state)
