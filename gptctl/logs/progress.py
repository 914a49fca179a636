"""The texts that show the progress of a training: a short line per step, and a progress bar.

Pure: numbers in, text out. Knows neither files nor terminals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gptctl.text import duration
from trainer.logline import Evaluation, TrainLine

LONGEST_BAR, SHORTEST_BAR = 40, 8
RECENT = 10  # train lines whose mean is the current speed


class StepHistory:
    """The steps and evaluations that a job has logged so far."""

    def __init__(self) -> None:
        self.step: int | None = None  # the newest one, also if only an evaluation logged it
        self.recent: deque[TrainLine] = deque(maxlen=RECENT)
        self.evaluations: dict[str, Evaluation] = {}  # the latest, by name

    @property
    def latest(self) -> TrainLine | None:
        return self.recent[-1] if self.recent else None

    def note(self, piece: object) -> None:
        if isinstance(piece, TrainLine | Evaluation):
            self.step = piece.step
        if isinstance(piece, TrainLine):
            self.recent.append(piece)
        elif isinstance(piece, Evaluation):
            self.evaluations[piece.name] = piece


def step_text(line: TrainLine, total: int) -> str:
    """`step   25/500  loss 2.7881   17,440 tokens/s  lr 3.00e-03`"""
    numbers = f"loss {line.loss:.4f}  {line.ips_total:>7,.0f} tokens/s  lr {line.learning_rate:.2e}"
    return f"{_step('step', line.step, total)}  {numbers}"


def evaluation_text(evaluation: Evaluation, total: int) -> str:
    """`valid 250/500  loss 1.9442`"""
    return f"{_step(evaluation.name, evaluation.step, total)}  loss {evaluation.loss:.4f}"


def _step(name: str, step: int, total: int) -> str:
    """Pad the step, so that the losses of all lines are in one column."""
    return f"{name:<5} {step:>{len(str(total))}}/{total or '?'}"


def seconds_per_step(lines: Iterable[TrainLine]) -> float | None:
    """Return the mean time of a step over these train lines; None if they do not have it."""
    costs = [cost for line in lines if (cost := _cost(line)) is not None]
    return sum(costs) / len(costs) if costs else None


def _cost(line: TrainLine) -> float | None:
    # The batch cost has five decimals, the speed only two: below 0.005 steps/s it is logged as 0.
    if math.isfinite(line.avg_batch_cost) and line.avg_batch_cost > 0:
        return line.avg_batch_cost
    return 1 / line.speed if math.isfinite(line.speed) and line.speed > 0 else None


class Position(NamedTuple):
    """The progress of a training."""

    step: int
    total: int  # 0 if unknown
    elapsed: float  # seconds
    left: float | None  # seconds; None if unknown


def progress_text(at: Position, width: int) -> str:
    """` 56% ━━━━━━────── step 560/1000  1:02 elapsed  0:40 left`, at most `width` wide."""
    if not at.total:
        return f"step {at.step}/?  {duration(at.elapsed)} elapsed"[:width]
    step = min(at.step, at.total)
    percent = f"{100 * step // at.total:3d}%"
    tails = list(_tails(at))
    room = [width - len(percent) - len(tail) - 2 for tail in tails]
    fits = next((n for n, size in enumerate(room) if size >= SHORTEST_BAR), None)
    if fits is None:
        return f"{percent} {tails[-1]}"[:width]
    size = min(LONGEST_BAR, room[fits])
    done = size * step // at.total
    return f"{percent} {'━' * done}{'─' * (size - done)} {tails[fits]}"


def _tails(at: Position) -> Iterator[str]:
    """The texts after the bar, longest first; a narrow window gets a shorter one."""
    elapsed, left = duration(at.elapsed), _left(at)
    yield f"step {at.step}/{at.total}  {elapsed} elapsed{'  ' if left else ''}{left}"
    yield f"{elapsed}{', ' if left else ' elapsed'}{left}"
    yield left or elapsed


def _left(at: Position) -> str:
    if at.step >= at.total:
        return "finishing"  # the last save, the test run and the sample take a while
    return "" if at.left is None else f"{duration(at.left)} left"
