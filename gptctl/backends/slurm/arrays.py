"""Slurm job arrays: jobs that are alike, as one submission.

Every task runs the script of its own job. Slurm's ids of tasks are `<array>_<task>`; the number of
a task is that of the run in its sweep.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.queue import Queue
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import ARRAY_MEMBERS
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord

ARRAY_SCRIPT = "array.sbatch"
DEFAULT_ARRAY_SIZE = 1001  # of Slurm: numbers up to 1000
# Options of sbatch that differ between jobs, and that the array has itself.
OWN_OPTIONS = ("chdir", "output")


def are_alike(plans: Sequence[LaunchPlan]) -> bool:
    """Whether these jobs ask Slurm for the same."""
    # Through a login host, every folder has to be sent, and may be lost, by itself.
    if len(plans) < 2 or any(plan.login for plan in plans):
        return False
    first = _common(plans[0])
    # Slurm has an option --array of its own; dependencies are those of one job.
    is_plain = not {"array", "dependency"} & set(first)
    return is_plain and all(_common(plan) == first for plan in plans)


def _common(plan: LaunchPlan) -> dict[str, str]:
    return {name: value for name, value in plan.sbatch.items() if name not in OWN_OPTIONS}


def max_array_size(client: SlurmClient) -> int:
    """The first number that a task must not have."""
    try:
        settings = client.run("scontrol", "show", "config")
    # sbatch will report it.
    except SlurmError:
        return DEFAULT_ARRAY_SIZE
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", settings, re.MULTILINE)
    return int(found[1]) if found else DEFAULT_ARRAY_SIZE


def task_list(numbers: Sequence[int], limit: int | None) -> str:
    """The value of --array: `0,1,2%3`."""
    tasks = ",".join(map(str, numbers))
    return f"{tasks}%{limit}" if limit else tasks


def write_array(
    plans: Sequence[LaunchPlan], records: Sequence[JobRecord], limit: int | None
) -> str:
    """Write the script of an array and the list of its jobs; return the script's path."""
    from gptctl.planning.render import render

    folder = records[0].array_dir
    options = {
        **_common(plans[0]),
        "array": task_list([record.sweep_index for record in records], limit),
        "chdir": folder,
        # What happens before a task has found its job.
        "output": os.path.join(folder.replace("%", "%%"), "%a.log"),
    }
    script = os.path.join(folder, ARRAY_SCRIPT)
    # Line N is the job of task N; numbers without a job have empty lines.
    lines = [""] * (1 + max(record.sweep_index for record in records))
    for plan, record in zip(plans, records):
        lines[record.sweep_index] = f"{plan.remote_dir}\t{plan.log_dir}"
    with private_files():
        os.makedirs(os.path.join(folder, "submitit"), exist_ok=True)
        for plan in plans:
            os.makedirs(plan.log_dir, exist_ok=True)
        _write(os.path.join(folder, ARRAY_MEMBERS), "\n".join(lines) + "\n")
        plan = plans[0]._replace(sbatch=options, remote_dir=folder)
        _write(script, render(plan, ARRAY_SCRIPT))
    return script


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def array_of(job: str) -> str:
    """The array of a task: 17 for 17_3; the job itself if it is not a task."""
    return job.partition("_")[0]


def order(job: str) -> tuple[int, ...]:
    """Sort key of Slurm's ids."""
    return tuple(int(part) for part in job.split("_") if part.isdecimal())


def was_removed(job: str, record: JobRecord, folder: RunFolder, queue: Queue) -> bool:
    """Whether somebody cancelled a task before it started: Slurm then forgets it at once.

    It still knows other tasks of the array. A task that has run would be known as long as they are.
    """
    if not record.array_dir or folder.attempts():
        return False
    return any(
        array_of(seen.id) == array_of(job) and seen.work_dir == record.array_dir
        for seen in queue.jobs.values()
    )
