"""Shorten records for a terminal: short step lines, no config dump, the sample text in one piece.

Pure: the lines of one log file go in, pieces come out. The log file itself keeps every line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from gptctl.logs.files import Kind
from trainer.logline import (
    COMPLETE,
    INDENT,
    PREFIX,
    TRAIN_START,
    Evaluation,
    TrainLine,
    is_config_title,
    parse_evaluation_line,
    parse_json_line,
    parse_sample_title,
    parse_train_line,
    rank_prefix,
)

# Lines. A longer record is not one of the known ones: show it instead of waiting for its end.
LONGEST_RECORD = 1000
_TRACEBACK = "Traceback (most recent call last):"
# A rank has failed, or torchrun was asked to stop.
_TORCHRUN_ERROR = re.compile(
    r"torch\.distributed\.elastic\.\S*\.(ChildFailedError|SignalException):"
)
_RULER = re.compile(r"={20,}\s*")
CONFIG_LINES = "config lines"  # what a terminal calls the hidden config dump


class Hidden(NamedTuple):
    num_lines: int
    what: str


class RankDetail(NamedTuple):
    """A line that every rank logs about itself, which a terminal hides."""


class Sample(NamedTuple):
    text: str


Piece = str | TrainLine | Evaluation | Hidden | RankDetail | Sample


class OpenRecord(Protocol):
    """A record of several lines, after its first line was read."""

    def takes(self, text: str) -> bool:
        """Add the next line if it belongs to the record; return whether it does."""

    def pieces(self) -> Iterator[Piece]: ...


class OpenConfig:
    """The config dump: its lines are indented."""

    def __init__(self) -> None:
        self._num_lines = 0

    def takes(self, text: str) -> bool:
        is_part = text.startswith(INDENT)
        self._num_lines += is_part
        return is_part

    def pieces(self) -> Iterator[Piece]:
        yield Hidden(self._num_lines, CONFIG_LINES)


class OpenSample:
    """The sample text that the trainer logs after training."""

    def __init__(self, title: str) -> None:
        # The first line, empty here, is the title's own. Whether lines have a stamp shows later.
        self._title, self._lines, self._is_stamped = title, [""], False

    def takes(self, text: str) -> bool:
        stamp = PREFIX.match(text)
        message = text[stamp.end() :] if stamp else text
        # The trainer stamps every line or only the first. The second line shows which, and a line
        # of the other form ends the sample.
        if len(self._lines) == 1:
            self._is_stamped = bool(stamp)
        is_next = bool(stamp) != self._is_stamped or bool(stamp and stamp[2] != "INFO")
        # A trainer that stamps every line gives no other sign of the end.
        is_next = is_next or message.startswith(COMPLETE) or bool(parse_sample_title(message))
        if is_next or len(self._lines) > LONGEST_RECORD:
            return False
        # Trailing spaces would make the box as wide as the window.
        self._lines.append(message.rstrip())
        return True

    def pieces(self) -> Iterator[Piece]:
        yield Sample("\n".join([self._title, *self._lines]).rstrip())


class OpenReport:
    """torchrun's traceback after a failure or a stop, which repeats what is known already."""

    def __init__(self) -> None:
        self._lines, self._error, self._num_rulers = [_TRACEBACK], "", 0
        self._is_complete = False

    def takes(self, text: str) -> bool:
        if not self._error and (found := _TORCHRUN_ERROR.match(text)):
            self._error = found[1]
        is_part = bool(self._error) or text.startswith(" ")
        if not is_part or self._is_complete or len(self._lines) > LONGEST_RECORD:
            return False
        self._lines.append(text)
        # After a failure a table follows, with a line of = at its start and at its end.
        self._num_rulers += bool(_RULER.fullmatch(text))
        self._is_complete = self._error == "SignalException" or self._num_rulers == 2
        return True

    def pieces(self) -> Iterator[Piece]:
        if self._error:
            yield Hidden(len(self._lines), "lines of torchrun's report")
        else:  # another traceback in a node's log is news: show it
            yield from self._lines


class Condenser:
    """Turns the lines of one log file into pieces."""

    def __init__(self, kind: Kind, number: int) -> None:
        self._kind = kind
        # Where a rank is and what it holds: with many ranks these lines would fill the window.
        self._detail = rank_prefix(number) if kind == "rank" else None
        self._open: OpenRecord | None = None

    def feed(self, text: str) -> Iterator[Piece]:
        if self._open and self._open.takes(text):
            return
        yield from self.close()
        # The JSON style writes a record of several lines in one: it is complete at once.
        record = json_record(text)
        if record and (opened := _open_stamped(record[0])):
            for line in record[1:]:
                opened.takes(line)
            yield from opened.pieces()
        elif self._kind == "node" and text == _TRACEBACK:
            self._open = OpenReport()
        else:
            yield from self._begin(text)

    def close(self) -> Iterator[Piece]:
        """Return what was read of the open record: the next one begins, or the job has ended."""
        opened, self._open = self._open, None
        if opened:
            yield from opened.pieces()

    def _begin(self, text: str) -> Iterator[Piece]:
        stamp = PREFIX.match(text)
        message = text[stamp.end() :] if stamp else text
        self._open = _open_stamped(message) if stamp else None
        if self._open:
            return
        if stamp and stamp[2] == "INFO" and self._detail and message.startswith(self._detail):
            yield RankDetail()
        elif step := parse_train_line(text) if TRAIN_START in text else None:
            yield step
        elif evaluation := parse_evaluation_line(text):
            yield evaluation
        else:
            # The time without the date is enough to watch a job; INFO is the normal case.
            level = "" if not stamp or stamp[2] == "INFO" else f"{stamp[2]}: "
            yield f"{stamp[1]} {level}{message}" if stamp else text


def _open_stamped(message: str) -> OpenRecord | None:
    """Open the record of several lines that begins with this message, if any does."""
    if is_config_title(message):
        return OpenConfig()
    title = parse_sample_title(message)
    return OpenSample(title) if title else None


def json_record(text: str) -> list[str]:
    """Return the lines of a record in the trainer's JSON style; empty for any other line."""
    # Parse only candidates: most lines are not JSON, and a terminal must keep up with the job.
    message = parse_json_line(text) if "\\n" in text else None
    if not message:
        return []
    # JSON can hold half of a surrogate pair, which cannot be printed.
    return message.encode("utf-8", "replace").decode().split("\n")
