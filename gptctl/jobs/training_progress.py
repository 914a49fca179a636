"""How far the training of a job is: from the end of a small file in its folder on this machine.

Never asks a host: `gptctl list` shows hundreds of jobs. For a job without a shared folder that is
what was copied before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.file_reading import (
    is_time,
    json_lines,
    read_bytes,
    read_json,
)
from gptctl.engine.job_result import FINAL, RUNNING
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.recorded_files import newest_rows, newest_valid_loss, tail_of
from gptctl.jobs.store import JobRecord
from gptctl.logs.lines import readable
from gptctl.logs.metric_rows import (
    Row,
    is_number,
    parse_lines,
    row_of_line,
    run_rows,
)
from gptctl.logs.progress import RECENT

LOG_TAIL = 64 << 10  # bytes of a script's log, which may have other lines between its steps
HEAD = 1 << 10  # bytes: the first line of a file
# How scripts call the number of their steps: on their command line, alone or as a config key.
_TOTAL = re.compile(
    r"(?:--|.*\.|)(?:max[-_]steps|max[-_]train[-_]steps|train[-_]iters|total[-_]steps)", re.ASCII
)


class TrainingProgress(NamedTuple):
    """The newest step of a training. What is not known is None."""

    step: int
    total: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    steps_per_line: int  # between the last two log lines
    updated: float  # seconds since the epoch

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time until the last step."""
        if self.total is None or self.seconds_per_step is None:
            return None
        left = max(0, self.total - self.step) * self.seconds_per_step
        # Count down until the next line is due. After that the training may hang: stop counting.
        passed = min(max(0.0, now - self.updated), self.steps_per_line * self.seconds_per_step)
        return max(0.0, left - passed)

    def as_json(self, now: float, is_running: bool) -> dict[str, Any]:
        # A training that was extended has a smaller total than steps until its config is known.
        percent = min(100, 100 * self.step // self.total) if self.total else None
        return {
            "step": self.step,
            "total": self.total,
            "percent": percent,
            "loss": self.loss,
            "valid_loss": self.valid_loss,
            "tokens_per_second": self.tokens_per_second,
            "seconds_per_step": self.seconds_per_step,
            "seconds_left": self.seconds_left(now) if is_running else None,
            "updated": self.updated,
        }


def progress_facts(record: JobRecord, state: str, now: float) -> dict[str, Any]:
    """The part of `gptctl list` and `status` that tells how far a job is."""
    progress = progress_of(record, is_over=state in FINAL)
    return {
        "duration": _duration(record, state, now),
        "progress": progress.as_json(now, state == RUNNING) if progress else None,
    }


def progress_of(record: JobRecord, is_over: bool) -> TrainingProgress | None:
    """Read the progress of a job; None if it has logged no step."""
    rows, changed = _last_rows(record)
    if not rows:
        return None
    found = from_rows(rows, changed)
    if found.total is None:
        found = found._replace(total=configured_steps(record))
    if found.valid_loss is None:
        found = found._replace(valid_loss=newest_valid_loss(record))
    # The last step is not logged unless it is a multiple of Engine.logging_freq.
    final = (trainer_status(record) or {}).get("step") if is_over else None
    return found._replace(step=final) if isinstance(final, int) and final > found.step else found


def trainer_status(record: JobRecord) -> dict[str, Any] | None:
    """Read what the trainer said last about its state; None if a later job wrote it."""
    found = read_json(Path(record.output_dir) / "status.json") if record.output_dir else None
    # Files of older versions do not tell who wrote them.
    return found if found and found.get("job") in (None, record.id) else None


def from_rows(rows: Sequence[Row], changed: float) -> TrainingProgress:
    """Sum up the last rows of a run; `changed` is when their file was written."""
    latest = rows[-1]
    # Steps of an earlier attempt may have run at another speed.
    trained = [row for row in rows if "speed" in row and row["attempt"] == latest["attempt"]]
    recent = trained[-RECENT:]
    costs = [cost for cost in map(_step_time, recent) if cost is not None]
    newest = recent[-1] if recent else {}
    total = newest.get("max_steps")
    return TrainingProgress(
        latest["step"],
        int(total) if total and total >= 1 else None,
        newest.get("loss"),
        next((row["valid_loss"] for row in reversed(rows) if row.get("valid_loss")), None),
        newest.get("ips_total"),
        sum(costs) / len(costs) if costs else None,
        recent[-1]["step"] - recent[-2]["step"] if len(recent) > 1 else 1,
        latest["time"] if is_time(latest.get("time")) else changed,
    )


def _step_time(row: Row) -> float | None:
    # Below 0.005 steps/s, a log line has a speed of 0.00, but the time of a step is exact.
    cost, speed = row.get("step_time"), row.get("speed")
    return cost if cost and cost > 0 else 1 / speed if speed and speed > 0 else None


def _last_rows(record: JobRecord) -> tuple[list[Row], float]:
    if record.output_dir:
        return newest_rows(record)
    for file in step_logs(record):
        data, changed = tail_of(file, LOG_TAIL)
        lines = parse_lines(map(readable, data.split(b"\n")))
        if rows := run_rows(map(row_of_line, lines)):
            return rows, changed
    return [], 0.0


def step_logs(record: JobRecord) -> list[Path]:
    """The logs of the latest attempt that may have the steps of a script."""
    attempt = RunFolder(record.local_dir).attempts() - 1
    folder = Path(record.log_dir, f"attempt-{attempt}")
    # Most scripts log on the first rank, some on the last.
    ranks = dict.fromkeys((0, record.world - 1))
    return [folder / f"workerlog.{rank}" for rank in ranks] if attempt >= 0 else []


def configured_steps(record: JobRecord) -> int | None:
    """Return the number of steps that the config or the command line of a script sets."""
    config = _section(read_json(record.run_folder / "config.json") or {}, "resolved")
    if not record.output_dir:
        arguments = _section(config, "Launch").get("args")
        return steps_of_arguments(arguments if isinstance(arguments, list) else ())
    engine = _section(config, "Engine")
    # An epoch's number of steps depends on the data: only the trainer knows it.
    steps = engine.get("max_steps") if engine.get("run_mode") != "epoch" else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    # A damaged file can have anything here.
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def steps_of_arguments(arguments: Sequence[object]) -> int | None:
    """Find the number of steps in the arguments of a script: `--max_steps 500`, `-o a.max_steps=5`.

    As in argparse, the last one counts.
    """
    words = [*map(str, arguments), ""]
    pairs = [
        word.partition("=")[::2] if "=" in word else (word if word.startswith("--") else "", after)
        for word, after in pairwise(words)
    ]
    values = [value for name, value in pairs if _TOTAL.fullmatch(name)]
    numbers = [int(value) for value in values if re.fullmatch(r"[1-9]\d{0,11}", value, re.ASCII)]
    return numbers[-1] if numbers else None


def _duration(record: JobRecord, state: str, now: float) -> float | None:
    """Return how long the job has run, from the start of its first rank."""
    result = RunFolder(record.local_dir).result()
    ended = now if state == RUNNING else result.ended if result else None
    started = started_at(record)
    return max(0.0, ended - started) if ended and started else None


def started_at(record: JobRecord) -> float | None:
    """Return when the first rank of node 0 started; restarts do not change it."""
    file = record.run_folder / "attempt-0" / "ranks.0.jsonl"
    first = next(json_lines(read_bytes(file, HEAD)), {})
    moment = first.get("time")
    return float(moment) if is_number(moment) and is_time(moment) else None
