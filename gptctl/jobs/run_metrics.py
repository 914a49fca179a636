"""What a run measured, over all of its attempts and jobs.

A job may continue another one: together they are one run, with one row per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from gptctl.jobs.evaluations import add_evaluations, evaluations_in, with_evaluations
from gptctl.jobs.history import History
from gptctl.jobs.recorded_files import recorded_rows, rows_of_file, say_nothing
from gptctl.jobs.store import JobRecord
from gptctl.logs.files import FileFilter
from gptctl.logs.local_files import LocalFile, LocalLogFiles
from gptctl.logs.metric_rows import Row, metric_rows, run_rows
from gptctl.reporting import Say
from trainer.checkpoint_names import METRICS


def whole_run(
    jobs: Sequence[JobRecord], names: tuple[str, ...] | None = None, say: Say = say_nothing
) -> list[Row]:
    """Return one row per step of a run; where steps overlap, the later job or attempt counts.

    `jobs` are those of `resume.lineage`: the newest one first. `names`: how the names begin
    of the numbers that are needed; None: all.
    """
    every = FileFilter(all_attempts=True)
    rows = run_rows(row for job in reversed(jobs) for row in job_rows(job, every, names, say))
    return with_evaluations(rows, jobs)


def removed_steps(jobs: Sequence[JobRecord], rows: Sequence[Row]) -> list[str]:
    """Explain the holes of a run: the steps of jobs whose folders were removed.

    `jobs` and `rows` are those of `whole_run`.
    """
    oldest_first = list(reversed(jobs))
    having, done, notes = {row["job"] for row in rows}, set[str](), list[str]()

    def is_lost(job: JobRecord) -> bool:
        return job.id not in having and not job.run_folder.is_dir()

    # Jobs that follow each other make one hole.
    for are_lost, group in groupby(oldest_first, is_lost):
        members = list(group)
        if are_lost:
            before = [row["step"] for row in rows if row["job"] in done]
            after = [row["step"] for row in rows if row["job"] not in done]
            notes += _hole(members, [0, *before][-1] + 1, after[0] - 1 if after else None)
        done |= {job.id for job in members}
    return notes


def _hole(jobs: Sequence[JobRecord], first: int, last: int | None) -> list[str]:
    # The next job may have logged its first step much later than these their last one.
    reached = max(map(_kept_step, jobs))
    ends = [step for step in (last, reached or None) if step is not None]
    last = min(ends, default=0)
    what = "folder of {} was" if len(jobs) == 1 else "folders of {} were"
    names = ", ".join(job.id for job in jobs)
    return [f"steps {first:,}-{last:,}: the {what.format(names)} removed"] if last >= first else []


def _kept_step(record: JobRecord) -> int:
    progress = History().facts(record).get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) else 0


def job_rows(
    record: JobRecord,
    wanted: FileFilter,
    names: tuple[str, ...] | None = None,
    say: Say = say_nothing,
) -> list[Row]:
    """Return the rows of a job, from metrics.jsonl, or from its log lines if it has none."""
    is_of_ranks = wanted.ranks is not None or wanted.node is not None
    found = [] if is_of_ranks else recorded_rows(record, names, say=say)
    if found and wanted.attempt is not None:
        found = [row for row in found if row["attempt"] == wanted.attempt]
    elif not found:
        files = LocalLogFiles(Path(record.log_dir), record.run_folder)
        found = metric_rows(files, wanted)
    # Not copies: they would need as much memory again.
    for row in found:
        row["job"] = record.id
    return found


def each_attempt(rows: list[Row]) -> list[Row]:
    """Return the rows of every attempt, also those that a later one replaced."""
    attempts = dict.fromkeys(row["attempt"] for row in rows)
    return [
        row
        for attempt in attempts
        for row in run_rows(each for each in rows if each["attempt"] == attempt)
    ]


def file_rows(
    path: Path, names: tuple[str, ...] | None = None, say: Say = say_nothing
) -> list[Row]:
    """Return the rows of a file: a metrics.jsonl, or a log with lines in FleetX's style."""
    rows = metric_rows(LocalFile(path), FileFilter())
    if not rows:
        rows = rows_of_file(path, names=names, say=say)
    rows = run_rows(rows)
    if path.name != METRICS:
        return rows
    return add_evaluations(rows, evaluations_in(path.parent))
