"""The text of training log lines: what writes a line stands next to what recognises it. Torch-free.

A train line in the style of FleetX starts like this; its prefix is green on a terminal:
[2022-07-27 13:17:17,469] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.266701698, …
The formats are fixed: tools and users parse them. What recognises a line must also cope with the
lines of any other program, since gptctl follows scripts, too.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
INDENT = "  "  # of the lines of a record after its title
CONFIG_TITLE = "Resolved config:"
COMPLETE = "The training process is complete."  # the last line
RESUMED_FROM = "resumed_from"  # in metrics.jsonl: earlier records of later steps are void
TRAIN_START = "global step "  # of a train line: to search for it before any line is parsed


def prefixed(text: str, level: str, time: datetime, coloured: bool) -> str:
    stamp = f"[{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03d}] [{level:>8}]"
    return f"{GREEN}{stamp} {PLAIN} - {text} {PLAIN}" if coloured else f"{stamp} - {text}"


# The prefix of a line without colours; its groups are the time of day and the level.
PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)(?:,\d+)?\] \[ *([A-Z]+)\] +- ")


def json_line(text: str, level: str, rank: int, time: datetime, fields: dict[str, Any]) -> str:
    stamp = time.isoformat(timespec="milliseconds")
    return json.dumps({"time": stamp, "level": level, "rank": rank, "message": text, **fields})


def parse_json_line(text: str) -> str | None:
    """Return the text of a line in the JSON style."""
    if text.startswith('{"time": "'):
        # Python raises RecursionError if any program writes a thousand brackets here.
        with suppress(ValueError, RecursionError):
            message = json.loads(text).get("message")
            return message if isinstance(message, str) else None
    return None


def rank_prefix(rank: int) -> str:
    """Starts the lines that a rank logs about itself."""
    return f"rank {rank}: "


class TrainLine(NamedTuple):
    step: int  # updates so far, counted from 1
    epoch: int  # from 0
    batch: int  # in the epoch, from 0
    loss: float
    avg_reader_cost: float  # seconds spent waiting for data
    avg_batch_cost: float  # seconds per update, including the wait for data
    speed: float  # updates per second
    ips_total: float  # tokens per second of the whole job
    ips: float  # tokens per second of one rank
    learning_rate: float  # of the next update, as in FleetX

    def __str__(self) -> str:
        return (
            f"{TRAIN_START}{self.step}, epoch: {self.epoch}, batch: {self.batch}, "
            f"loss: {self.loss:.9f}, avg_reader_cost: {self.avg_reader_cost:.5f} sec, "
            f"avg_batch_cost: {self.avg_batch_cost:.5f} sec, speed: {self.speed:.2f} step/s, "
            f"ips_total: {self.ips_total:.0f} tokens/s, ips: {self.ips:.0f} tokens/s, "
            f"learning rate: {self.learning_rate:.5e}"
        )


# Bounded repetitions: any script can log such a line, and int() rejects digits without end.
_COUNT = r"(\d{1,12})"
_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))"
_TRAIN = re.compile(
    rf"{TRAIN_START}{_COUNT}, epoch: {_COUNT}, batch: {_COUNT}, loss: {_NUMBER}, "
    rf"avg_reader_cost: {_NUMBER} sec, avg_batch_cost: {_NUMBER} sec, speed: {_NUMBER} step/s, "
    rf"ips_total: {_NUMBER} tokens/s, ips: {_NUMBER} tokens/s, learning rate: {_NUMBER}"
)


def parse_train_line(text: str) -> TrainLine | None:
    """Parse a train line anywhere in the text, whatever prefix or colour codes surround it."""
    found = _TRAIN.search(text)
    if not found:
        return None
    step, epoch, batch, *numbers = found.groups()
    return TrainLine(int(step), int(epoch), int(batch), *map(float, numbers))


EVALUATIONS = ("valid", "test")  # names of evaluations


class Evaluation(NamedTuple):
    name: str  # one of EVALUATIONS
    step: int
    loss: float


def evaluation_line(name: str, step: int, epoch: int, batch: int, loss: float, speed: float) -> str:
    """`name` is valid or test; `batch` is the last evaluated batch, counted from 0."""
    return (
        f"{name} step {step}, epoch: {epoch}, batch: {batch}, loss: {loss:f}, "
        f"speed: {speed:.2f} step/s"
    )


_EVALUATION = re.compile(
    rf"\b({'|'.join(EVALUATIONS)}) step {_COUNT}, epoch: \d+, batch: \d+, "
    r"loss: ([-+]?(?:\d{1,300}(?:\.\d{1,300})?|inf|nan)), speed: "
)


def parse_evaluation_line(text: str) -> Evaluation | None:
    found = _EVALUATION.search(text)
    return Evaluation(found[1], int(found[2]), float(found[3])) if found else None


def epoch_line(rank: int, epoch: int, iteration: int, name: str, loss: float) -> str:
    """minGPT's line. Epochs are counted from 1; `name` is Train or Eval."""
    return f"[GPU{rank}] Epoch {epoch} | Iter {iteration} | {name} Loss {loss:.5f}"


def is_mingpt_train_line(text: str) -> bool:
    return "| Train Loss " in text


def length_line(steps: int, batch_size: int, samples: int) -> str:
    """Announce the length of a training; `samples` is the size of its data."""
    # Short: with the rank and the time before it, it must fit in a terminal of 80 columns.
    return f"Training: {steps:,} steps of {batch_size:,} samples; data: {samples:,} samples"


_LENGTH = re.compile(r"(?:^|[ :-] )(\d[\d,]{0,19}) steps of [\d,]+ samples\b")


def announced_steps(text: str) -> int | None:
    """Return the number of steps in a length line."""
    found = _LENGTH.search(text)
    return int(found[1].replace(",", "")) if found else None


def is_config_title(message: str) -> bool:
    return message.rstrip() == CONFIG_TITLE


def sample_title(prompt: str) -> str:
    return f"Sample text after {prompt!r}:"


# Logs of earlier versions have `A sample, after`.
_SAMPLE = re.compile(r"(?:A sample,|Sample text) (after .*:)\s*$")


def parse_sample_title(message: str) -> str | None:
    """Return `after 'the prompt':` if this is the title of a sample text."""
    found = _SAMPLE.match(message)
    return found[1] if found else None
