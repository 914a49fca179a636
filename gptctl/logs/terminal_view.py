"""What a terminal shows of a followed job: short lines, with a status or progress bar below them.

Decides what to show; `gptctl.cli.ui` draws it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gptctl.engine.job_result import RUNNING
from gptctl.logs.condense import CONFIG_LINES, Condenser, Hidden, Piece, RankDetail, Sample
from gptctl.logs.files import LogFile, LogFiles
from gptctl.logs.lines import readable
from gptctl.logs.printer import Printer, hidden_text
from gptctl.logs.progress import (
    Position,
    StepHistory,
    evaluation_text,
    progress_text,
    seconds_per_step,
    step_text,
)
from gptctl.logs.rank_count import RankWatch, count_text, first_start
from gptctl.logs.stream import Line
from gptctl.logs.tables import failure_line, failure_of
from gptctl.text import duration
from trainer.logline import Evaluation, TrainLine, announced_steps, is_mingpt_train_line


class Screen(Protocol):
    """A terminal whose bottom line is updated in place."""

    @property
    def width(self) -> int: ...

    def draw(self, text: str) -> None: ...

    def erase(self) -> None: ...

    def box(self, title: str, text: str) -> None: ...


class FollowedJob(NamedTuple):
    id: str
    world: int
    total_steps: int  # 0 if unknown
    logs_steps: bool  # True for the bundled trainer; a user's script may log steps, too
    created: float
    ended: float = math.inf  # seconds since the epoch, if it has ended


class TerminalView:
    """A `LineWriter` for terminals. `condenses`: shorten long records instead of showing them."""

    def __init__(
        self, printer: Printer, screen: Screen, files: LogFiles, job: FollowedJob, condenses: bool
    ) -> None:
        self._printer, self._screen, self._files, self._job = printer, screen, files, job
        self._condenses = condenses
        self._condensers: dict[tuple[int, str], Condenser] = {}  # by attempt and file name
        self._last: dict[tuple[int, str], Line] = {}  # the last line of each file
        self._step_loggers: set[int] = set()  # ranks
        self._hidden: Counter[str] = Counter()  # lines of the banner, by what they are
        self._attempt: int | None = None  # the newest one that has logged a line
        self._ranks = RankWatch(files, job.world)
        self._status, self._logs_steps = "starting …", job.logs_steps
        self._started: float | None = None  # when the first rank started
        self._step_seen: float | None = None  # when the newest step of this attempt was read
        self.history, self.total_steps = StepHistory(), job.total_steps

    def add_files(self, files: Iterable[LogFile]) -> None:
        self._printer.add_files(files)

    def line(self, line: Line) -> None:
        # The bottom line would stay on the screen above the new line.
        self._screen.erase()
        self._follow_attempts(line.file.attempt)
        key = line.file.attempt, line.file.name
        if key not in self._condensers:
            self._condensers[key] = Condenser(line.file.kind, line.file.number)
        self._last[key] = line
        for piece in self._condensers[key].feed(readable(line.text)):
            self._note(piece, line.file.attempt)
            if self._condenses:
                self._show(piece, line)
        if not self._condenses:
            self._printer.line(line)

    def flush(self) -> None:
        self._printer.flush()
        self._screen.draw(self._bottom_line())

    def say(self, text: str) -> None:
        self._screen.erase()
        self._printer.say(text)

    def update(self, state: str) -> None:
        """Update the status: the state of the job and, until the first step, the count of ranks."""
        if self._started is None:
            self._started = first_start(self._files)
        if max(self._files.attempts(), default=0) > (self._attempt or 0):
            self._step_seen = None  # the ranks start again
        if state != RUNNING:
            self._status = f"{state} …"
        elif self._step_seen is None:
            self._status = count_text(self._ranks.count(), self._job.world, self._logs_steps)

    def close(self) -> None:
        """Show the records that are still open, and clear the bottom line."""
        self._screen.erase()
        self._close_records()
        self._printer.flush()

    def _follow_attempts(self, attempt: int) -> None:
        """Explain why there is a new attempt, when its first line arrives."""
        before = self._attempt
        if before is None or attempt > before:
            self._attempt, self._step_seen = attempt, None
            if before is not None:
                self._close_records()
                _, failure = failure_of(self._files, before)
                self.say(f"{failure_line(before, failure)}; attempt {attempt} starts")

    def _close_records(self) -> None:
        for key, condenser in self._condensers.items():
            for piece in condenser.close():
                if self._condenses:
                    self._show(piece, self._last[key])
        self._report_hidden_banner()

    def _note(self, piece: Piece, attempt: int) -> None:
        self.history.note(piece)
        if isinstance(piece, TrainLine | Evaluation) and attempt == self._attempt:
            self._step_seen = time.monotonic()
        elif isinstance(piece, str):
            # Only the trainer knows how many steps an epoch has.
            self.total_steps = announced_steps(piece) or self.total_steps
            # minGPT's style logs no lines that can be parsed as steps.
            if is_mingpt_train_line(piece):
                self._logs_steps = False

    def _show(self, piece: Piece, line: Line) -> None:
        if isinstance(piece, TrainLine):
            self._report_hidden_banner()
            self._show_step(step_text(piece, self.total_steps), line)
        elif isinstance(piece, Evaluation):
            self._report_hidden_banner()
            self._show_step(evaluation_text(piece, self.total_steps), line)
        elif isinstance(piece, Hidden) and piece.what == CONFIG_LINES:
            self._hidden[piece.what] += piece.num_lines
        elif isinstance(piece, Hidden):
            self._report_hidden(f"{piece.num_lines:,} {piece.what}")
        elif isinstance(piece, Sample):
            self._printer.flush()
            self._screen.box("Sample text", piece.text)
        elif isinstance(piece, RankDetail):
            self._hidden["rank lines"] += 1
        else:
            self._printer.line(line._replace(text=piece.encode()))

    def _show_step(self, text: str, line: Line) -> None:
        """Show a step; with the prefix of its rank only if several ranks log steps."""
        self._step_loggers.add(line.file.number)
        if len(self._step_loggers) > 1:
            self._printer.line(line._replace(text=text.encode()))
        else:
            self._printer.text(text)

    def _report_hidden_banner(self) -> None:
        """Report in one line what was hidden before the first step."""
        if self._hidden:
            parts = [f"{number:,} {what}" for what, number in sorted(self._hidden.items())]
            self._report_hidden(" and ".join(parts))
            self._hidden.clear()

    def _report_hidden(self, what: str) -> None:
        self._printer.text(hidden_text(what, self._job.id))

    def _bottom_line(self) -> str:
        elapsed = min(time.time(), self._job.ended) - (self._started or self._job.created)
        step, width = self.history.step, self._screen.width
        # A new attempt has no step yet: show its status, not the old progress.
        if step is None or self._step_seen is None:
            return f"{self._status}  {duration(elapsed)}"[:width]
        seconds = seconds_per_step(self.history.recent)
        left = None
        # Count down between two train lines, which may be minutes apart.
        if seconds is not None:
            left = (self.total_steps - step) * seconds
            left = max(0.0, left - (time.monotonic() - self._step_seen))
        return progress_text(Position(step, self.total_steps, elapsed, left), width)
