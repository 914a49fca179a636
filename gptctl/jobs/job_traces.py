"""The traces of a job: where they are, and copying them from other machines."""

from __future__ import annotations

import os
from pathlib import Path

from gptctl.backends import Backend
from gptctl.engine.file_reading import DamagedFile
from gptctl.engine.run_folder import read_plan
from gptctl.jobs.resume import frozen_value
from gptctl.jobs.store import JobRecord
from gptctl.remote.limits import MAX_FETCHED, MAX_FILES
from gptctl.reporting import FetchedFolder, FetchOptions, Say, ShowProgress
from gptctl.traces.trace_search import TraceSet, find_traces
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError
from trainer.trace_files import profiler_folder

ELSEWHERE = "profiler_log"  # in the folder of a job here: copies of traces from outside its output


def job_traces(record: JobRecord, backend: Backend, say: Say, show: ShowProgress) -> list[TraceSet]:
    """Find the traces of a job, copied to this machine; raise UserError if there are none."""
    if not record.output_dir:
        message = f"{record.id} runs a script of yours: gptctl does not know where its traces are"
        raise UserError(message, "give the path of a trace, or of its folder", WRONG_USAGE)
    place = trace_place(record)
    is_elsewhere = backend.is_elsewhere(record)
    problem = _fetch(record, backend, place, show) if is_elsewhere else None
    folder = place.local if is_elsewhere else place.remote
    found = find_traces(Path(folder))
    if not found:
        raise problem or _nothing(record, folder)
    if problem:
        say(f"warning: {problem.message}; these are the traces that were copied before")
    return found


def trace_place(record: JobRecord) -> FetchedFolder:
    """Where a job writes its traces, as its nodes see it, and where they are on this machine."""
    log = frozen_value(record, "Profiler.profiler_log")
    try:
        output = read_plan(record.run_folder).output_dir
    except DamagedFile:
        output = record.output_dir
    remote = os.path.join(
        profiler_folder(output, log if isinstance(log, str) else ELSEWHERE), record.id
    )
    is_inside = remote.startswith(f"{output.rstrip('/')}/")
    below = os.path.relpath(remote, output) if is_inside else ""
    local = os.path.join(record.output_dir, below) if below else ""
    return FetchedFolder(remote, local or os.path.join(record.local_dir, ELSEWHERE, record.id))


def _fetch(
    record: JobRecord, backend: Backend, place: FetchedFolder, show: ShowProgress
) -> UserError | None:
    """Copy the traces to this machine; return why that failed."""
    try:
        backend.fetch(record, FetchOptions(None, False, MAX_FETCHED, MAX_FILES, place), show)
    except UserError as error:
        return error
    return None


def _nothing(record: JobRecord, folder: str) -> UserError:
    if not frozen_value(record, "Profiler.enable"):
        hint = f"record some steps: gptctl rerun {record.id} -o Profiler.enable=True"
        return UserError(f"{record.id} was submitted without a profile", hint, ANSWER_IS_NO)
    steps = frozen_value(record, "Profiler.scheduler")
    end = steps[1] if isinstance(steps, list) and len(steps) == 2 else 5
    message = f"{record.id} has no traces in {folder}"
    hint = f"they are written when step {end - 1} is done: see gptctl logs {record.id}"
    return UserError(message, hint, ANSWER_IS_NO)
