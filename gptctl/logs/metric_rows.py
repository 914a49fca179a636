"""What a training measured, step by step: rows from metrics.jsonl, or from log lines.

A row maps names to values, and always has `attempt` and `step`. Its other names are those of
metrics.jsonl; rows from log lines in FleetX's style have fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from sys import intern
from typing import Any, TypeGuard

from gptctl.engine.file_reading import json_lines
from gptctl.logs.files import FileFilter, LogFile, LogFiles
from gptctl.logs.lines import readable
from gptctl.logs.match import Grep
from gptctl.logs.stream import LineFilter, LogReader, merged
from trainer.logline import (
    EVALUATIONS,
    RESUMED_FROM,
    TRAIN_START,
    Evaluation,
    TrainLine,
    parse_evaluation_line,
    parse_train_line,
)

NO_STEPS = "no step has been logged yet; scripts need log lines in FleetX's style"
MOST_USELESS = 100_000  # lines without a step, in a row: another file, or a damaged one
HIGHEST_STEP = 10**12  # more is not a step, whatever a script or a host sends
MOST_ATTEMPTS = 1 << 31
MOST_NAMES, LONGEST_NAME = 200, 64  # of numbers in a line; the trainer writes thirty
_ALWAYS = ("step", "attempt", "loss", "speed", RESUMED_FROM)  # what `run_rows` and others rely on
Row = dict[str, Any]
BEFORE_ALL = (0, -1)  # attempt and step before the first row

_FORMATS = {
    "step": "{}",
    "loss": "{:.9f}",
    "valid_loss": "{:.6f}",
    "test_loss": "{:.6f}",
    "ips": "{:.0f}",
    "ips_total": "{:.0f}",
    "speed": "{:.2f}",
    "lr": "{:.5e}",
}
_EVALUATED = ("eval_ppl:", "cloze_accuracy:")  # of `gptctl eval`, then the name of the text
_ONLY_IF_USED = ("valid_loss", "test_loss")  # columns that many runs do not have


def is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < 1e300  # a longer integer cannot be converted to a float
        and math.isfinite(value)
    )


def parse_metrics(data: bytes, job: str = "", world: int = 1) -> list[Row]:
    """Parse the text of a metrics.jsonl; see `rows_in`."""
    return list(rows_in(json_lines(data), job, world))


def rows_in(
    lines: Iterable[Mapping[str, Any]],
    job: str = "",
    world: int = 1,
    names: tuple[str, ...] | None = None,
    before: tuple[int, int] = BEFORE_ALL,
) -> Iterator[Row]:
    """Make rows of the lines of metrics.jsonl, oldest first, without those of other jobs.

    `names`: how the names begin of the numbers that are needed; None: all. `before`: attempt and
    step of the last row, for whoever reads a file in pieces. `run_rows` drops what a later attempt
    trained again.
    """
    useless = 0
    for line in lines:
        numbers, writer = _numbers(line), line.get("job")
        step: float = numbers.get("step", numbers.get(RESUMED_FROM, -1))
        # Jobs may share an output folder. Files of older versions do not tell who wrote a line.
        if 0 <= step < HIGHEST_STEP and (not job or writer in (None, job)):
            before = _attempt(before, numbers), int(step)
            own = {"attempt": before[0], "step": before[1]}
            row = {**numbers, **own, **_speeds(numbers, world)}
            useless = 0
            yield row if names is None else _needed(row, names)
        elif not 0 <= step < HIGHEST_STEP and (useless := useless + 1) > MOST_USELESS:
            return


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    # One text per name for all rows; a damaged line has any number of them, of any length.
    return {
        intern(name): value
        for name, value in islice(line.items(), MOST_NAMES)
        if is_number(value) and len(name) <= LONGEST_NAME
    }


def _needed(row: Row, names: tuple[str, ...]) -> Row:
    return {name: value for name, value in row.items() if name in _ALWAYS or name.startswith(names)}


def _attempt(before: tuple[int, int], numbers: Row) -> int:
    """`before`: attempt and step of the row before this one."""
    if 0 <= numbers.get("attempt", -1) < MOST_ATTEMPTS:
        return int(numbers["attempt"])
    # Without gptctl nobody numbers them: steps that repeat are those of the next attempt.
    is_next = numbers.get("step", -1) < before[1] or RESUMED_FROM in numbers
    return before[0] + int(is_next)


def _speeds(numbers: Row, world: int) -> Row:
    """Add the names that FleetX's lines use."""
    if "loss" not in numbers and "step_time" not in numbers:
        return {}  # an evaluation
    rate, cost = numbers.get("tokens_per_second"), numbers.get("step_time")
    return {
        "loss": numbers.get("loss"),  # not in the file if it was not finite
        "lr": numbers.get("lr"),
        "ips": None if rate is None else rate / max(1, world),
        "ips_total": rate,
        "speed": 1 / cost if cost else None,
    }


def row_of_line(line: TrainLine | Evaluation, attempt: int = 0) -> Row:
    if isinstance(line, Evaluation):
        return {"attempt": attempt, "step": line.step, f"{line.name}_loss": _finite(line.loss)}
    return {
        "attempt": attempt,
        "step": line.step,
        "loss": _finite(line.loss),
        "ips": _finite(line.ips),
        "ips_total": _finite(line.ips_total),
        "speed": _finite(line.speed),
        "lr": _finite(line.learning_rate),
        "step_time": _finite(line.avg_batch_cost),
    }


def _finite(value: float) -> float | None:
    return value if is_number(value) else None


def run_rows(rows: Iterable[Row]) -> list[Row]:
    """Join rows to one per step: what was trained again replaces what was lost.

    When a run resumes at an earlier step, everything after that step is void, also steps that the
    new attempt or job has not reached yet. An evaluation becomes a part of the row of its step.
    The trainer records the step it resumed from; without that, the first step after it is the sign.
    """
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] > row["step"]:
            kept.pop()
        if RESUMED_FROM in row:
            continue
        last = kept[-1] if kept and kept[-1]["step"] == row["step"] else None
        is_same = last is not None and all(last.get(k) == row.get(k) for k in ("job", "attempt"))
        if last is None:
            kept.append(row)
        elif is_same and "speed" not in row:
            kept[-1] = {**last, **row}
        else:
            kept[-1] = row
    return kept


def metric_rows(files: LogFiles, wanted: FileFilter) -> list[Row]:
    """Read the rows from log lines: each step of an attempt once, from the lowest rank."""
    steps: dict[tuple[int, int], Row] = {}
    for file in wanted.now(files):
        logged: dict[tuple[int, int], Row] = {}
        for line in _step_lines(files, file):
            # A step that is repeated replaces the earlier one: torchrun restarted the training.
            key, row = (file.attempt, line.step), row_of_line(line, file.attempt)
            logged[key] = row if isinstance(line, TrainLine) else {**logged.get(key, {}), **row}
        # Files are sorted by rank, so steps of lower ranks are already there, and win.
        steps = {**logged, **steps}
    return [row for _, row in sorted(steps.items(), key=lambda item: item[0])]


def _step_lines(files: LogFiles, file: LogFile) -> Iterator[TrainLine | Evaluation]:
    # The filter skips most of a file before any line is decoded.
    starts = "|".join([TRAIN_START, *(f"{name} step " for name in EVALUATIONS)])
    source = LogReader(files, file, LineFilter(grep=Grep(starts)))
    return parse_lines(readable(line.text) for line in merged([source], close=True))


def parse_lines(texts: Iterable[str]) -> Iterator[TrainLine | Evaluation]:
    for text in texts:
        if found := parse_train_line(text) or parse_evaluation_line(text):
            yield found


def with_all_names(rows: Iterable[Row]) -> list[Row]:
    """Add null for what a row lacks: programs can rely on the names of FleetX's numbers."""
    names = dict.fromkeys(name for name in _FORMATS if name not in _ONLY_IF_USED)
    return [{**names, **row} for row in rows]


def metric_table(rows: Sequence[Row], job: str = "") -> tuple[list[str], list[list[str]]]:
    """Make columns and cells for people; with the job and the attempt if there are several.

    Also with the job if all rows are of another one than `job`, which was asked for.
    """
    used = {name for row in rows for name, value in row.items() if value is not None}
    columns = [name for name in _FORMATS if name in used or name not in _ONLY_IF_USED]
    columns += sorted(name for name in used if name.startswith(_EVALUATED))
    jobs, attempts = ({row.get(name) for row in rows} for name in ("job", "attempt"))
    is_of_others = len(jobs) > 1 or bool(job and jobs - {job, None})
    sources = [
        *(["job"] if is_of_others else []),
        *(["attempt"] if len(attempts) > 1 else []),
    ]
    cells = [
        [*(str(row.get(name)) for name in sources), *(_cell(row, name) for name in columns)]
        for row in rows
    ]
    return [*sources, *columns], cells


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else _FORMATS.get(name, "{:.6g}").format(value)
