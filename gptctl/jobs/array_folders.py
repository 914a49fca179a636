"""The folder that the tasks of a scheduler's array share. It is removed with its last job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gptctl.engine.contract import ARRAY_MEMBERS
from gptctl.engine.file_reading import read_text
from gptctl.jobs.store import JobRecord


def array_name(sweep: str, token: str) -> str:
    """The name of a new folder: a sweep that is resumed has several arrays."""
    return f"{sweep}-array-{token}"


def remove_unused_folder(record: JobRecord) -> None:
    """Remove the folder of the job's array if none of its jobs has a run folder any more."""
    # The token: a damaged record must not name any other folder.
    folder = Path(record.array_dir)
    if not record.token or folder.name != array_name(record.sweep, record.token):
        return
    # Each line: the folders of a job. The list is written before the array is submitted.
    jobs = [line.partition("\t")[0] for line in read_text(folder / ARRAY_MEMBERS).splitlines()]
    # Without the list nobody knows whether a task still needs the folder: it stays.
    if any(jobs) and not any(job and os.path.lexists(job) for job in jobs):
        shutil.rmtree(folder, ignore_errors=True)
