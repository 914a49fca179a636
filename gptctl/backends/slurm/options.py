"""The options of sbatch. Flags and config take precedence over the profile."""

from __future__ import annotations

import os.path
from typing import Any

from gptctl.engine.launch_plan import LaunchPlan, seconds_of
from gptctl.spec.check import Checked
from gptctl.spec.launch import Launch, Slurm

WARNING = 120  # seconds before the time limit at which a job saves by default


def sbatch_options(checked: Checked, run_dir: str, log_dir: str) -> dict[str, str]:
    """Return the options by name, in the order in which they are written to the script."""
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
        name, prefix = ("gres", "gpu:") if is_gres else ("gpus-per-node", "")
        options[name] = f"{prefix}{machines.per_node}"
    # The last ones win: `extra` of the config over `sbatch` of the profile over our own.
    options |= {**cluster.sbatch, **slurm.extra}
    # Only for jobs in a run folder: scripts for pasting do not have an engine.
    if run_dir:
        options |= {
            "chdir": run_dir,
            # % begins a pattern of Slurm.
            "output": os.path.join(log_dir.replace("%", "%%"), "batch.log"),
            "open-mode": "append",
            "signal": f"B:USR1@{_warning(slurm)}",
            "requeue" if is_requeued(checked.launch) else "no-requeue": "",
        }
    written = {name: str(value) for name, value in options.items() if value is not None}
    # An option without a value is written as `exclusive: true` in YAML.
    flags = {
        name for name, value in written.items() if value in ("True", "true") and name != "comment"
    }
    return {name: "" if name in flags else value for name, value in written.items()}


def submitted_comment(plan: LaunchPlan, token: str) -> str:
    """Return the comment of the Slurm job: the token comes first; one of the user is kept."""
    return " ".join(filter(None, [token, plan.sbatch.get("comment", "")]))


def is_requeued(launch: Launch) -> bool:
    """Whether Slurm may requeue the job; by default only the trainer, which resumes by itself."""
    return launch.entrypoint == "trainer" if launch.slurm.requeue is None else launch.slurm.requeue


def _warning(slurm: Slurm) -> int:
    """Return how many seconds before its time limit a job saves."""
    # At most a quarter of the limit: a short job must have time to train, too.
    limit = seconds_of(slurm.time) if slurm.time else 4 * WARNING
    return slurm.save_before or min(WARNING, max(1, limit // 4))
