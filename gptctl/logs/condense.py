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
_CHILD_FAILED = re.compile(r"torch\.distributed\.elastic\.\S*\.ChildFailedError:")
_RULER = re.compile(r"={20,}\s*")
# Ten digits or more: no step count or rate of a training is that long.
_LONG_NUMBER = re.compile(r"(?<![.\d])\d{10}")


class Hidden(NamedTuple):
    num_lines: int
    what: str


class RankDetail(NamedTuple):
    """A line that every rank logs about itself; a terminal shows that of rank 0 only."""


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
        yield Hidden(self._num_lines, "config lines")


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
    """torchrun's traceback and table after a failure, which repeat what the ranks have logged."""

    def __init__(self) -> None:
        self._lines, self._is_report, self._num_rulers = [_TRACEBACK], False, 0

    def takes(self, text: str) -> bool:
        self._is_report = self._is_report or bool(_CHILD_FAILED.match(text))
        is_part = self._is_report or text.startswith(" ")
        if not is_part or self._num_rulers == 2 or len(self._lines) > LONGEST_RECORD:
            return False
        # The table has a line of = at its start and at its end.
        self._num_rulers += bool(_RULER.fullmatch(text))
        self._lines.append(text)
        return True

    def pieces(self) -> Iterator[Piece]:
        if self._is_report:
            yield Hidden(len(self._lines), "lines of torchrun's report")
        else:  # another traceback in a node's log is news: show it
            yield from self._lines


class Condenser:
    """Turns the lines of one log file into pieces."""

    def __init__(self, kind: Kind, number: int) -> None:
        self._kind = kind
        # Lines of rank 0 are shown in full; the other ranks log the same about themselves.
        self._detail = rank_prefix(number) if kind == "rank" and number else None
        self._open: OpenRecord | None = None

    def feed(self, text: str) -> Iterator[Piece]:
        if self._open and self._open.takes(text):
            return
        yield from self.close()
        # The JSON style writes a record of several lines in one: it is complete at once.
        record = _json_record(text)
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
        elif step := _train_line(text) if TRAIN_START in text else None:
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


def _train_line(text: str) -> TrainLine | None:
    """Parse a train line, if this is one."""
    # Any script may write such a line, and parsing huge numbers could take hours.
    return None if _LONG_NUMBER.search(text) else parse_train_line(text)


def _json_record(text: str) -> list[str]:
    """Return the lines of a record in the trainer's JSON style; empty for any other line."""
    # Parse only candidates: most lines are not JSON, and a terminal must keep up with the job.
    message = parse_json_line(text) if "\\n" in text else None
    return message.split("\n") if message else []
