"""Whether a running job makes progress: how far it is, and for how long it has said nothing."""

from __future__ import annotations

from typing import Any

from gptctl.engine.file_reading import read_json
from gptctl.jobs.job_phase import phase_of
from gptctl.jobs.store import JobRecord
from gptctl.jobs.training_progress import TrainingProgress, progress_of, started_at
from gptctl.logs.files import LogFiles

SLOWER = 10  # times the usual time between two log lines: an evaluation or a checkpoint takes less
SHORTEST = 120.0  # seconds without a step that may mean something
SILENT = 900.0  # seconds without any log line: importing and compiling take less


def run_pace(record: JobRecord, files: LogFiles, now: float) -> dict[str, Any]:
    """The pace of a job, as JSON. Times are for people: clocks of hosts may differ."""
    progress = progress_of(record, is_over=False)
    latest = max(files.attempts(), default=0)
    changed = max((file.changed for file in files.scan(latest)), default=None)
    started = started_at(record)
    idle = _age(progress.updated if progress else changed, now)
    usual = _usual_interval(record, progress) if progress else None
    limit = max(SHORTEST, SLOWER * usual) if usual else SILENT
    return {
        "progress": progress.as_json(now, is_running=True) if progress else None,
        "phase": phase_of(record, now, progress.updated if progress else None),
        "duration": _age(started, now),
        "idle": idle,  # seconds since the last logged step, or without any, since the last log line
        "usual_interval": usual,  # seconds between two logged steps
        "seems_stuck": idle is not None and idle > limit,
    }


def _usual_interval(record: JobRecord, progress: TrainingProgress) -> float | None:
    """The seconds between two log lines, as the last steps took."""
    if progress.seconds_per_step is None:
        return None
    # Two lines tell how many steps are between them; after the first one, only the config does.
    return progress.seconds_per_step * max(progress.steps_per_line, _logging_freq(record))


def _logging_freq(record: JobRecord) -> int:
    config = (read_json(record.run_folder / "config.json") or {}).get("resolved")
    engine = config.get("Engine") if isinstance(config, dict) else None
    steps = engine.get("logging_freq") if isinstance(engine, dict) else None
    return steps if isinstance(steps, int) and 0 < steps < 1_000_000 else 1


def _age(moment: float | None, now: float) -> float | None:
    # A clock may have been set: nothing is younger than now.
    return None if moment is None else max(0.0, now - moment)
