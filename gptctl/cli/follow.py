"""Follow a job until it ends: print its lines, changes of its state, and a closing summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptctl.cli import INTERRUPTED
from gptctl.cli.session import Session, files_of
from trainer.errors import UserError

if TYPE_CHECKING:
    from gptctl.backends import JobState
    from gptctl.jobs.store import JobRecord
    from gptctl.logs.files import FileFilter, LogFiles
    from gptctl.logs.outcome import Outcome
    from gptctl.logs.stream import LineFilter, LineWriter
    from gptctl.logs.terminal_view import TerminalView

Update = Callable[[str], None]  # called about once a second with the state of the job


class StateReporter:
    """The state of a followed job: reports it while the job is not running, and when it changes."""

    def __init__(
        self, session: Session, record: JobRecord, say: Callable[[str], None], update: Update
    ) -> None:
        self._session = session
        self._record, self._say, self._update = record, say, update
        self._last_reported = ""

    def is_over(self) -> bool:
        from gptctl.engine.job_result import RUNNING
        from gptctl.jobs.state import is_final

        state = self._session.state_of(self._record)
        if is_final(state):
            # Hosts that were unreachable may be back, with lines that nobody has seen.
            self._session.backend_of(self._record).await_hosts(self._record)
            return True
        # Slurm estimates the start again in every answer: a new estimate alone is not news.
        words = str(state).partition(", expected")[0]
        # Do not report RUNNING if it is the first state: the log lines show it.
        if words != self._last_reported and (self._last_reported or state.state != RUNNING):
            self._last_reported = words
            self._say(f"{self._record.id}: {state}")
        self._update(state.state)
        return False


def follow_job(
    session: Session, record: JobRecord, wanted: FileFilter, lines: LineFilter, style: Any = "text"
) -> int:
    """Follow until the job ends; return the exit code of the job."""
    # Log lines are written to the buffer below, and must not overtake text printed before.
    sys.stdout.flush()
    if style == "text" and sys.stdout.isatty():
        return follow_on_terminal(session, record, wanted, lines)
    from gptctl.cli import ui
    from gptctl.logs.printer import Printer

    printer = Printer(sys.stdout.buffer, style, say=ui.say)
    # Counts of ranks are for people: a program that reads stderr gets only changes of the state.
    update = rank_lines(record, printer.say) if sys.stderr.isatty() else no_update
    if not follow_until_over(session, record, wanted, lines, printer, update):
        return report_still_running(record)
    return close_plainly(session, record)


def follow_on_terminal(
    session: Session, record: JobRecord, wanted: FileFilter, lines: LineFilter
) -> int:
    """Print short lines, a progress bar below them, and a summary at the end."""
    from gptctl.cli import ui
    from gptctl.logs.printer import Printer
    from gptctl.logs.terminal_view import TerminalView

    screen, files = ui.TerminalScreen(), files_of(record)
    printer = Printer(sys.stdout.buffer, coloured=screen.has_colours, say=ui.say)
    # With --grep or --errors, show the matching lines as they are.
    view = TerminalView(
        printer, screen, files, followed(record), condenses=not (lines.grep or lines.errors)
    )
    update = view.update if screen.is_in_place else rank_lines(record, view.say)
    try:
        is_over = follow_until_over(session, record, wanted, lines, view, update)
    finally:  # remove the progress bar even after an error or Ctrl-C
        view.close()
    return (
        close_with_summary(session, record, files, view)
        if is_over
        else report_still_running(record)
    )


def follow_until_over(
    session: Session,
    record: JobRecord,
    wanted: FileFilter,
    lines: LineFilter,
    show: LineWriter,
    update: Update,
) -> bool:
    """Follow until the job ends; return False if the user presses Ctrl-C."""
    from gptctl.jobs.notify_watcher import notifying
    from gptctl.logs.stream import follow

    watched = StateReporter(session, record, show.say, update)
    try:
        # On ssh clusters the backend copies new log lines here in the background.
        with (
            session.backend_of(record).following(record),
            notifying(record, lambda: session.state_of(record), show.say),
        ):
            follow(files_of(record), wanted, lines, show, watched.is_over)
    except KeyboardInterrupt:
        return False
    return True


def no_update(state: str) -> None:
    return  # for output that shows no counts of ranks


def rank_lines(record: JobRecord, say: Callable[[str], None]) -> Update:
    from gptctl.logs.rank_count import RankLines

    return RankLines(files_of(record), record.world, bool(record.output_dir), say).update


def followed(record: JobRecord) -> Any:
    from gptctl.engine.run_folder import RunFolder
    from gptctl.jobs.training_progress import configured_steps
    from gptctl.logs.terminal_view import FollowedJob

    # In epoch mode only the trainer knows the number of steps, and logs it.
    total = configured_steps(record) or 0
    job = FollowedJob(record.id, record.world, total, bool(record.output_dir), record.created)
    # A job that has ended long ago must not look as if it had run until now.
    result = RunFolder(record.local_dir).result()
    return job._replace(ended=result.ended) if result and result.ended else job


def report_still_running(record: JobRecord) -> int:
    from gptctl.cli import ui
    from gptctl.jobs import job_status

    ui.say(job_status.still_running(record))
    return INTERRUPTED


def close_plainly(session: Session, record: JobRecord) -> int:
    from gptctl.cli import ui
    from gptctl.engine.job_result import FAILED
    from gptctl.jobs import job_status
    from gptctl.jobs.state import exit_code

    # Copy the last lines here, so that `logs --failed` has them.
    session.catch_up(record)
    state = session.state_of(record)
    if state.state == FAILED:
        hint = (job_status.failure_json(state, record) or {}).get("hint")
        ui.say("\n".join(filter(None, [f"hint: gptctl logs {record.id} --failed", hint])))
    # Last, below what torchrun believes to be the root cause.
    ui.say(f"{record.id}: {state}")
    return exit_code(state)


def close_with_summary(
    session: Session, record: JobRecord, files: LogFiles, view: TerminalView
) -> int:
    from gptctl.cli import ui
    from gptctl.jobs.state import exit_code
    from gptctl.logs.outcome import outcome_rows

    session.catch_up(record)
    # Ask after copying: the result of a remote job may be among the last files.
    state = session.state_of(record)
    code = exit_code(state)
    # The keys of a script are not known: no longer run of it can be suggested.
    steps = view.total_steps if record.output_dir else 0
    rows = outcome_rows(outcome_of(session, record, files, state, steps), view.history)
    ui.print_box(record.id, rows, colour="red" if code else "green")
    return code


def outcome_of(
    session: Session, record: JobRecord, files: LogFiles, state: JobState, total_steps: int
) -> Outcome:
    from gptctl.engine.file_reading import read_json
    from gptctl.engine.job_result import FAILED
    from gptctl.engine.run_folder import RunFolder
    from gptctl.logs.outcome import Outcome
    from gptctl.logs.rank_count import first_start
    from gptctl.logs.tables import failure_line, failure_of

    # Read from files of the run folder: they are complete once the job has ended.
    folder = RunFolder(record.local_dir)
    result, started = folder.result(), first_start(files)
    failure = failure_of(files, is_over=folder.is_complete(state.state))
    # A job that lost its nodes has no result: it ends when gptctl notices.
    ended = result.ended if result and result.ended else time.time()
    status = (read_json(Path(record.output_dir) / "status.json") or {}) if record.output_dir else {}
    step = status.get("step")
    return Outcome(
        record.id,
        state.state,
        state.reason,
        failure_line(*failure) if state.state == FAILED else "",
        ended - (started or record.created),
        folder.attempts(),
        total_steps,
        step if isinstance(step, int) else None,
        saved_steps(session, record),
        short_path(record.local_dir),
    )


def saved_steps(session: Session, record: JobRecord) -> tuple[int, ...]:
    """Find the steps of the checkpoints in the output folder, on whichever host it is."""
    from gptctl.engine.run_folder import checkpoint_steps

    names: list[str] = []
    if record.output_dir:
        # A host that is down must not prevent the summary.
        with suppress(UserError, OSError):
            _, names = session.backend_of(record).checkpoints(record)
    return tuple(checkpoint_steps(names))


def short_path(path: str) -> str:
    """Make a path relative to the current folder if it is inside, so that it fits on a line."""
    with suppress(OSError, ValueError):
        return str(Path(path).relative_to(os.getcwd()))
    return path
