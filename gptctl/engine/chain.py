"""Jobs of a chain: each continues the training of the one before, in the same output folder."""

from __future__ import annotations

from pathlib import Path

from gptctl.engine.file_reading import read_json
from gptctl.engine.job_result import CANCELLED, COMPLETED, FAILED, Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder


def chain_result(plan: LaunchPlan) -> Result | None:
    """How a job of a chain ends at once, if there is nothing to continue; None: it must run."""
    if not plan.continues:
        return None
    if _is_trained(plan):
        return Result(COMPLETED, "training was already complete")
    before = RunFolder(plan.continues)
    result = before.result()
    name = f"{before.path.name}, which this job continues,"
    # Whoever cancels a job does not want the next one to continue in its place.
    if before.is_cancelled() or (result and result.state == CANCELLED):
        return Result(CANCELLED, f"{name} was cancelled")
    # A job without attempts ended by this rule itself, or could not start at all.
    attempts = before.attempts()
    is_hopeless = not attempts or before.is_unrecoverable(attempts - 1)
    if result and result.state == FAILED and is_hopeless:
        return Result(FAILED, f"{name} failed: this one would fail in the same way")
    return None


def _is_trained(plan: LaunchPlan) -> bool:
    """Whether a job of this chain has finished the training."""
    status = (read_json(Path(plan.output_dir) / "status.json") if plan.output_dir else None) or {}
    # By name, not by time: an earlier run in the same folder may have finished, and the clocks of
    # the hosts that wrote these times may differ.
    return status.get("job") in plan.chain and status.get("state") == "finished"
