"""Formats and parses training log lines in the style of FleetX and minGPT. Torch-free.

A train line starts like this; its prefix is green on a terminal:
[2022-07-27 13:17:17,469] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.266701698, …
The formats are fixed: tools and users parse them.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


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
            f"global step {self.step}, epoch: {self.epoch}, batch: {self.batch}, "
            f"loss: {self.loss:.9f}, avg_reader_cost: {self.avg_reader_cost:.5f} sec, "
            f"avg_batch_cost: {self.avg_batch_cost:.5f} sec, speed: {self.speed:.2f} step/s, "
            f"ips_total: {self.ips_total:.0f} tokens/s, ips: {self.ips:.0f} tokens/s, "
            f"learning rate: {self.learning_rate:.5e}"
        )


_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))"
_TRAIN = re.compile(
    rf"global step (\d+), epoch: (\d+), batch: (\d+), loss: {_NUMBER}, "
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


def evaluation_line(name: str, step: int, epoch: int, batch: int, loss: float, speed: float) -> str:
    """`name` is valid or test; `batch` is the last evaluated batch, counted from 0."""
    return (
        f"{name} step {step}, epoch: {epoch}, batch: {batch}, loss: {loss:f}, "
        f"speed: {speed:.2f} step/s"
    )


def epoch_line(rank: int, epoch: int, iteration: int, name: str, loss: float) -> str:
    """minGPT's line. Epochs are counted from 1; `name` is Train or Eval."""
    return f"[GPU{rank}] Epoch {epoch} | Iter {iteration} | {name} Loss {loss:.5f}"


def prefixed(text: str, level: str, time: datetime, coloured: bool) -> str:
    stamp = f"[{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03d}] [{level:>8}]"
    return f"{GREEN}{stamp} {PLAIN} - {text} {PLAIN}" if coloured else f"{stamp} - {text}"
