"""The options of sbatch: config and flags win over the profile."""

from __future__ import annotations

import os.path
from typing import Any

from gptctl.engine.launch_plan import seconds_of
from gptctl.spec.check import Checked
from gptctl.spec.launch import Launch, Slurm

WARNING = 120  # seconds before the time limit at which a job saves


def sbatch_options(checked: Checked, run_dir: str, log_dir: str) -> dict[str, str]:
    """Options of sbatch by name, in the order they are written; flags and config win over the profile."""
    slurm, cluster, machines = checked.launch.slurm, checked.cluster, checked.machines
    cpus = slurm.cpus_per_task or cluster.cpus_per_task
    options: dict[str, Any] = {
        "job-name": checked.launch.job_name,
        "partition": slurm.partition or cluster.partition,
        "account": slurm.account or cluster.account,
        "nodes": "-".join(map(str, dict.fromkeys(checked.launch.node_range))),
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "time": slurm.time,
    }
    if checked.device == "gpu" and cluster.gpu_request != "none":
        is_gres = cluster.gpu_request == "gres"
        options["gres" if is_gres else "gpus-per-node"] = (
            f"{'gpu:' if is_gres else ''}{machines.per_node}"
        )
    options |= {**cluster.sbatch, **slurm.extra}
    if run_dir:
        options |= {
            "chdir": run_dir,
            "output": os.path.join(
                log_dir.replace("%", "%%"), "batch.log"
            ),  # % begins a pattern of Slurm's
            "open-mode": "append",
            "signal": f"B:USR1@{_warning(slurm)}",
            "requeue" if is_requeued(checked.launch) else "no-requeue": "",
        }
    written = {name: str(value) for name, value in options.items() if value is not None}
    flags = {
        name for name, value in written.items() if value in ("True", "true") and name != "comment"
    }
    return {
        name: "" if name in flags else value for name, value in written.items()
    }  # `exclusive: true`


def is_requeued(launch: Launch) -> bool:
    """The trainer goes on where it was; what a script does when it is started again, only its author knows."""
    return launch.entrypoint == "trainer" if launch.slurm.requeue is None else launch.slurm.requeue


def _warning(slurm: Slurm) -> int:
    """How many seconds before its time limit a job saves: a quarter of a short one."""
    limit = seconds_of(slurm.time) if slurm.time else 4 * WARNING
    return slurm.save_before or min(WARNING, max(1, limit // 4))
