"""What a run measured, over all of its attempts and jobs.

A job may continue another one: together they are one run, with one row per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptctl.jobs.store import JobRecord
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalFile, LocalLogFiles
from gptctl.logs.metric_rows import METRICS_FILE, Row, metric_rows, parse_metrics, run_rows


def whole_run(jobs: Sequence[JobRecord]) -> list[Row]:
    """Return one row per step of a run; where steps overlap, the later job or attempt counts.

    `jobs` are those of `resume.lineage`: the newest one first.
    """
    return run_rows(
        row for job in reversed(jobs) for row in job_rows(job, FileFilter(all_attempts=True))
    )


def job_rows(record: JobRecord, wanted: FileFilter) -> list[Row]:
    """Return the rows of a job, from metrics.jsonl, or from its log lines if it has none."""
    is_of_ranks = wanted.ranks is not None or wanted.node is not None
    found = [] if is_of_ranks else _recorded(record)
    if found and wanted.attempt is not None:
        found = [row for row in found if row["attempt"] == wanted.attempt]
    elif not found:
        files = LocalLogFiles(Path(record.log_dir), record.run_folder)
        found = metric_rows(files, wanted)
    return [{"job": record.id, **row} for row in found]


def _recorded(record: JobRecord) -> list[Row]:
    if not record.output_dir:
        return []
    try:
        data = Path(record.output_dir, METRICS_FILE).read_bytes()
    except OSError:
        return []
    return parse_metrics(data, record.id, record.world)


def each_attempt(rows: list[Row]) -> list[Row]:
    """Return the rows of every attempt, also those that a later one replaced."""
    attempts = dict.fromkeys(row["attempt"] for row in rows)
    return [
        row
        for attempt in attempts
        for row in run_rows(each for each in rows if each["attempt"] == attempt)
    ]


def file_rows(path: Path) -> list[Row]:
    """Return the rows of a file: a metrics.jsonl, or a log with lines in FleetX's style."""
    rows = metric_rows(LocalFile(path), FileFilter())
    if not rows:
        try:
            rows = parse_metrics(path.read_bytes())
        except OSError:
            rows = []
    return run_rows(rows)
