"""Everything that a report shows of a run: gathered from the files of its jobs on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.backends import Backends, JobState
from gptctl.jobs.attempt_failures import FailureText, failure_texts
from gptctl.jobs.costs import EarlierSteps, JobTimes, times_of_job
from gptctl.jobs.job_status import known_states, status
from gptctl.jobs.rank_map import RankMap, rank_map
from gptctl.jobs.rank_times import rank_times
from gptctl.jobs.resume import lineage
from gptctl.jobs.run_facts import Facts, file_facts, job_facts
from gptctl.jobs.run_metrics import file_rows, removed_steps, whole_run
from gptctl.jobs.store import JobRecord, Store
from gptctl.logs.metric_rows import Row


class RunReport(NamedTuple):
    """One run: a job with those that it continues, or a file of metrics."""

    job: str  # its id, or the path of the file
    status: Mapping[str, Any] | None  # as `gptctl status --json`; None: of a file
    lineage: tuple[str, ...]  # oldest first
    rows: list[Row]
    jobs: list[JobTimes]  # of each of its jobs, oldest first
    ranks: RankMap | None
    failures: list[FailureText]
    facts: Facts
    notes: list[str]  # what is missing


def report_of_job(record: JobRecord, store: Store, backends: Backends, now: float) -> RunReport:
    """Gather what is known of a job; new files of other machines were copied before."""
    records = lineage(record, store)
    states = known_states(records, backends)
    notes: list[str] = []
    if not record.run_folder.is_dir():
        notes.append(f"the folder of {record.id} is missing: the report has only what is left")
    rows = whole_run(records, say=notes.append)
    earlier = EarlierSteps(store)
    oldest_first = list(reversed(records))
    return RunReport(
        record.id,
        status(record, backends),
        tuple(each.id for each in oldest_first),
        rows,
        [times_of_job(each, states[each.id].state, earlier, now) for each in oldest_first],
        rank_map(times for each in oldest_first for times in rank_times(each)),
        _failures(oldest_first, states),
        job_facts(record),
        [*notes, *removed_steps(records, rows)],
    )


def _failures(records: Sequence[JobRecord], states: Mapping[str, JobState]) -> list[FailureText]:
    return [found for each in records for found in failure_texts(each, states[each.id])]


def report_of_file(file: Path) -> RunReport:
    """A run that gptctl did not start has its metrics, and what the trainer wrote beside them."""
    notes: list[str] = []
    rows = file_rows(file, say=notes.append)
    return RunReport(str(file), None, (), rows, [], None, [], file_facts(file), notes)
