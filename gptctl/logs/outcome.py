"""The closing summary of a followed job, with commands to try next. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gptctl.engine.job_result import COMPLETED, FAILED
from gptctl.logs.progress import StepHistory
from gptctl.text import duration

MOST_CHECKPOINTS = 6  # listed one by one; more would not fit on a line
MORE_STEPS = 2  # the suggested next run trains for this many times the steps


class Outcome(NamedTuple):
    """The facts about a job that has ended."""

    job: str
    state: str
    reason: str
    failure: str  # one line: which rank failed first, and how
    seconds: float | None
    attempts: int
    total_steps: int  # 0 if unknown, or if it is a user's script
    final_step: int | None
    checkpoints: tuple[int, ...]  # steps
    folder: str


Row = tuple[str, str]


def outcome_rows(outcome: Outcome, history: StepHistory) -> list[Row]:
    """Make the rows of the summary: name and text, most important first."""
    attempts = f" in {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    rows = [
        ("state", f"{outcome.state}: {outcome.reason}" if outcome.reason else outcome.state),
        ("failure", outcome.failure),
        *_training_rows(outcome, history),
        ("duration", "" if outcome.seconds is None else duration(outcome.seconds) + attempts),
        ("checkpoints", checkpoint_text(outcome.checkpoints)),
        ("files", outcome.folder),
        ("try next", "\n".join(next_commands(outcome))),
    ]
    # A user's own script has no losses or checkpoints: leave out empty rows.
    return [(name, text) for name, text in rows if text]


def _training_rows(outcome: Outcome, history: StepHistory) -> Iterator[Row]:
    if history.step is None:
        return
    final = outcome.final_step or history.step
    yield "loss", ", ".join(_losses(history, final))
    yield "speed", _speed(history)
    total = f" of {outcome.total_steps:,}" if outcome.total_steps else ""
    yield "steps", f"{final:,}{total}"


def _losses(history: StepHistory, final: int) -> Iterator[str]:
    if latest := history.latest:
        # The final step has no train line unless it is a multiple of Engine.logging_freq.
        step = f" (step {latest.step:,})" if latest.step < final else ""
        yield f"{latest.loss:.4f}{step}"
    yield from (f"{each.name} {each.loss:.4f}" for each in history.evaluations.values())


def _speed(history: StepHistory) -> str:
    num_lines = len(history.recent)
    if not num_lines:
        return ""
    rate = sum(line.ips_total for line in history.recent) / num_lines
    lines = f" (mean of the last {num_lines} log lines)" if num_lines > 1 else ""
    return f"{rate:,.0f} tokens/s{lines}"


def checkpoint_text(steps: Iterable[int]) -> str:
    """`step 250, 500`"""
    ordered = sorted(steps)
    if not ordered:
        return ""
    if len(ordered) > MOST_CHECKPOINTS:
        return f"{len(ordered)}, from step {ordered[0]} to step {ordered[-1]}"
    return f"step {', '.join(map(str, ordered))}"


def next_commands(outcome: Outcome) -> list[str]:
    job = outcome.job
    again = [f"gptctl show {job}", f"gptctl rerun {job} --follow"]
    # `rerun` starts from scratch: with checkpoints, most users want to resume instead.
    is_resumable = outcome.checkpoints and outcome.state != COMPLETED
    resume = [f"gptctl resume {job} --follow"] if is_resumable else []
    if outcome.state == FAILED:
        return [f"gptctl logs {job} --failed", *resume, *again]
    if outcome.state != COMPLETED or not outcome.total_steps:
        return [*resume, f"gptctl logs {job}", *again]
    steps = outcome.total_steps * MORE_STEPS
    return [
        f"gptctl logs {job} --metrics",
        f"gptctl show {job}",
        f"gptctl rerun {job} --follow -o Engine.max_steps={steps}",
    ]
