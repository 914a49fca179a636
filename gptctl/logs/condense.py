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
_END_OF_SAMPLE = re.compile(r"The training process is complete\.|Stopped on ")
_EVALUATION = re.compile(
    r"\b(valid|test) step (\d+), epoch: \d+, batch: \d+, loss: ([-+]?(?:[\d.]+|inf|nan)), speed: "
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
        lines = _message_lines(text)
        for line in lines:
            if not self._continues(line):
                yield from self._begin(line)
        if len(lines) > 1:  # a whole record: the next line is another one
            yield from self.close()

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
        if found := _SAMPLE.match(message):
            self._sample = [found[1]]
        elif _CONFIG.match(message):
            self._config = 0
        elif stamp and stamp[2] == "INFO" and self._detail and message.startswith(self._detail):
            yield RankDetail()
        elif step := parse_train_line(text) if "global step " in text else None:
            yield step
        elif found := _EVALUATION.search(text):
            yield Evaluation(found[1], int(found[2]), float(found[3]))
        else:
            level = "" if not stamp or stamp[2] == "INFO" else f"{stamp[2]}: "
            yield f"{stamp[1]} {level}{message}" if stamp else text


def _sample_text(title: str, *lines: str) -> str:
    """Without the spaces at the ends of lines, which would make a box as wide as the window."""
    text = "\n".join(line.rstrip() for line in lines)
    return f"{title}\n\n{text.rstrip()}"


def _message_lines(text: str) -> list[str]:
    """The trainer's JSON style writes a whole record in one line; split those two that are long."""
    if text.startswith('{"time": "') and "\\n" in text:
        with suppress(ValueError, KeyError, AttributeError):
            message = json.loads(text)["message"]
            if _CONFIG.match(first := message.split("\n")[0]) or _SAMPLE.match(first):
                return [str(line) for line in message.split("\n")]
    return [text]
