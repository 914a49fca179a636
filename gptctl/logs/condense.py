"""Shortens records for a terminal: short steps, no config dump, the sample text as one piece.

Pure: the lines of one log file go in, pieces come out. Nothing is lost: the file has every line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from gptctl.logs.progress import Evaluation
from trainer.logline import TrainLine, parse_train_line

_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)(?:,\d+)?\] \[ *([A-Z]+)\] +- ")
_CONFIG = re.compile(r"Resolved config:\s*$")
_SAMPLE = re.compile(r"(?:A sample,|Sample text) (after .*:)\s*$")
_LONG_NUMBER = re.compile(r"(?<![.\d])\d{10}")
_END_OF_SAMPLE = re.compile(r"The training process is complete\.")
LONGEST_SAMPLE = 1000  # lines; beyond them it is no sample, and must not be held back
_EVALUATION = re.compile(
    r"\b(valid|test) step (\d{1,12}), epoch: \d+, batch: \d+, "
    r"loss: ([-+]?(?:\d{1,300}(?:\.\d{1,300})?|inf|nan)), speed: "
)


class ConfigDump(NamedTuple):
    num_lines: int


class RankDetail(NamedTuple):
    """A line that every rank logs about itself; that of rank 0 is enough on a terminal."""


class Sample(NamedTuple):
    text: str


Piece = str | TrainLine | Evaluation | ConfigDump | RankDetail | Sample


class Condenser:
    """Of one log file; `rank` is None for other files than a rank's."""

    def __init__(self, rank: int | None) -> None:
        self._detail = f"rank {rank}: " if rank else None
        self._config: int | None = None  # lines of the config dump that is being read
        self._sample: list[str] | None = None  # lines of the sample text that is being read
        self._is_stamped = False  # whether each line of that sample has a stamp of its own

    def feed(self, text: str) -> Iterator[Piece]:
        if self._continues(text):
            return
        yield from self.close()
        if record := _json_record(text):
            title, *lines = record
            self._begin_long(title)
            for line in lines:
                self._continues(line)
            yield from self.close()
        else:
            yield from self._begin(text)

    def close(self) -> Iterator[Piece]:
        """The piece that was being read: a new record begins, or the job has ended."""
        if self._config is not None:
            yield ConfigDump(self._config)
        if self._sample is not None:
            yield Sample(_sample_text(*self._sample))
        self._config = self._sample = None

    def _continues(self, text: str) -> bool:
        """Whether a line belongs to the record that is being read."""
        if self._config is not None and text.startswith("  "):
            self._config += 1
            return True
        return self._sample is not None and self._continues_sample(self._sample, text)

    def _continues_sample(self, sample: list[str], text: str) -> bool:
        """The trainer stamps each line of a sample, or only the first: the second one tells."""
        if len(sample) > LONGEST_SAMPLE:
            return False
        stamp = _STAMP.match(text)
        if len(sample) == 1:
            self._is_stamped = bool(stamp)
        message = text[stamp.end() :] if stamp else text
        is_next_record = bool(stamp) != self._is_stamped or (stamp and stamp[2] != "INFO")
        if is_next_record or _END_OF_SAMPLE.match(message) or _SAMPLE.match(message):
            return False
        sample.append(message)
        return True

    def _begin(self, text: str) -> Iterator[Piece]:
        stamp = _STAMP.match(text)
        message = text[stamp.end() :] if stamp else text
        if stamp and self._begin_long(message):
            return
        if stamp and stamp[2] == "INFO" and self._detail and message.startswith(self._detail):
            yield RankDetail()
        elif step := _train_line(text) if "global step " in text else None:
            yield step
        elif found := _EVALUATION.search(text):
            yield Evaluation(found[1], int(found[2]), float(found[3]))
        else:
            level = "" if not stamp or stamp[2] == "INFO" else f"{stamp[2]}: "
            yield f"{stamp[1]} {level}{message}" if stamp else text

    def _begin_long(self, message: str) -> bool:
        """Whether a record begins of which the following lines are a part."""
        if _CONFIG.match(message):
            self._config = 0
        elif found := _SAMPLE.match(message):
            self._sample = [found[1]]
        return self._config is not None or self._sample is not None


def _train_line(text: str) -> TrainLine | None:
    """Any script may write such a line. Numbers that no training has would take hours to parse."""
    return None if _LONG_NUMBER.search(text) else parse_train_line(text)


def _sample_text(title: str, *lines: str) -> str:
    """Without the spaces at the ends of lines, which would make a box as wide as the window."""
    text = "\n".join(line.rstrip() for line in lines)
    return f"{title}\n\n{text.rstrip()}"


def _json_record(text: str) -> list[str]:
    """The lines of a long record in the trainer's JSON style, which writes it in one line."""
    if text.startswith('{"time": "') and "\\n" in text:
        with suppress(ValueError, KeyError, AttributeError):
            lines: list[str] = json.loads(text)["message"].split("\n")
            if _CONFIG.match(lines[0]) or _SAMPLE.match(lines[0]):
                return lines
    return []
