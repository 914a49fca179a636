"""Results of `gptctl eval`, added to the rows of the steps whose checkpoints were evaluated."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from gptctl.engine.file_reading import read_json
from gptctl.jobs.store import JobRecord
from gptctl.jobs.training_progress import trainer_status
from gptctl.logs.metric_rows import HIGHEST_STEP, Row, is_number
from gptctl.text import clean
from trainer.checkpoint_names import EVALUATION

MOST = 10_000  # files of one folder that are read: the newest ones
# kind of the evaluation -> the start of the names, and what is taken from the result
_NUMBERS = {
    "perplexity": ("eval", ("loss", "ppl", "adjusted_ppl")),
    "cloze": ("cloze", ("accuracy", "loss")),
}


_SETTINGS = ("window", "stride")


class Evaluation(NamedTuple):
    """What was measured on the checkpoint of a step, as `eval_ppl:wiki.txt`."""

    time: float
    step: int
    numbers: dict[str, float]


def evaluations_in(folder: Path) -> list[Evaluation]:
    """Read the results that are beside the checkpoints of a folder, oldest first."""
    try:
        names = [name for name in os.listdir(folder) if EVALUATION.fullmatch(name)]
    except OSError:
        return []
    if len(names) > MOST:  # their names are random: only the time says which are new
        names = nlargest(MOST, names, key=lambda name: _changed(folder / name))
    results = [read_json(folder / name) or {} for name in sorted(names)]
    results.sort(key=lambda facts: facts["time"] if is_number(facts.get("time")) else 0.0)
    settings: dict[object, object] = {}  # of the first result of each name
    return [each for facts in results if (each := _parsed(facts, settings))]


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _parsed(facts: dict[str, Any], settings: dict[object, object]) -> Evaluation | None:
    step, kind, path, time = (facts.get(name) for name in ("step", "task", "path", "time"))
    known = _NUMBERS.get(kind) if isinstance(kind, str) else None
    if not (known and is_number(step) and 0 <= step < HIGHEST_STEP and isinstance(path, str)):
        return None
    start, names = known
    text = " ".join(clean(PurePosixPath(path).name).split())
    # Other windows, or another text of this name, would make a curve of numbers of two kinds.
    own = [facts.get(name) if is_number(facts.get(name)) else None for name in _SETTINGS]
    if settings.setdefault((kind, text), (path, own)) != (path, own):
        words = [f"{name} {value:g}" for name, value in zip(_SETTINGS, own) if value is not None]
        text = " ".join(clean(path).split()) + (f" ({', '.join(words)})" if words else "")
    numbers = {f"{start}_{name}:{text}": facts.get(name) for name in names}
    kept = {name: value for name, value in numbers.items() if is_number(value)}
    return Evaluation(time if is_number(time) else 0.0, int(step), kept)


def with_evaluations(rows: list[Row], jobs: Sequence[JobRecord]) -> list[Row]:
    """Add what was measured on checkpoints of these jobs; `jobs[0]` is the newest one."""
    folders = dict.fromkeys(job.output_dir for job in jobs if job.output_dir)
    # Later jobs, of which nothing is known here, may have saved to the same folder.
    last = max((row["step"] for row in rows[-1:]), default=0)
    reached = (trainer_status(jobs[0]) or {}).get("step") if jobs else None
    last = max(last, reached) if isinstance(reached, int) else last
    for folder in folders:
        found = [each for each in evaluations_in(Path(folder)) if each.step <= last]
        rows = add_evaluations(rows, found, {job.id for job in jobs if job.output_dir == folder})
    return rows


def add_evaluations(
    rows: Sequence[Row], found: Iterable[Evaluation], jobs: Collection[str] | None = None
) -> list[Row]:
    """Add results to the rows of their steps, and rows for steps that were not logged.

    `jobs` are those that saved to the folder of the results; None: all. A later job may have
    trained a step again, and saved it elsewhere.
    """
    joined = [dict(row) for row in rows]
    for each in found:
        after = bisect_right(joined, each.step, key=lambda row: row["step"])
        before: Row = joined[max(0, after - 1)] if joined else {"attempt": 0}
        if not joined or jobs is None or before["job"] in jobs:
            if before.get("step") != each.step:
                before = {name: before[name] for name in ("job", "attempt") if name in before}
                before["step"] = each.step
                joined.insert(after, before)
            before.update(each.numbers)
    return joined
