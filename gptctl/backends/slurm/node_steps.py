"""Commands on the nodes of a running Slurm job: steps that share the resources of the job."""

from __future__ import annotations

from collections.abc import Sequence

from gptctl.engine.file_reading import read_text
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.run_folder import RunFolder, read_plan
from gptctl.remote.scripts import remote_command
from trainer.errors import ANSWER_IS_NO, UserError

START_TIMEOUT = 30  # seconds for which srun may wait; the resources are there


def step_on_node(
    folder: RunFolder, node: int, words: Sequence[str], has_terminal: bool
) -> list[str]:
    """The command that runs a module of the job's engine on a node; srun ends it with itself."""
    # srun does not know the ids of array tasks, which the claim has.
    claimed = (folder.claimed_by() or {}).get("scheduler_id", "")
    job = read_text(folder.slurm_job_file).strip() or claimed
    hosts = read_text(folder.attempt(folder.attempts() - 1) / "hosts").split()
    # An elastic job may have fewer nodes than it may use.
    if not job or node >= len(hosts):
        message = f"node {node} of this job has not started" if hosts else "the job is starting"
        raise UserError(message, "try again in a moment", ANSWER_IS_NO)
    plan = read_plan(folder.path)
    pythons = (plan.engine_python, plan.submit_python)
    command = remote_command("run_module_here.sh", plan.remote_dir, *pythons, *words)
    if words[0] == "node_shell" and plan.srun_container:
        command = _shell_inside(plan, words[2:])
    return [
        "srun",
        f"--jobid={job}",
        "--overlap",
        *("--nodes=1", "--ntasks=1", f"--nodelist={hosts[node]}"),
        "--quit-on-interrupt",
        f"--immediate={START_TIMEOUT}",
        # --pty has its own way to pass on the output.
        "--pty" if has_terminal else "--unbuffered",
        *command,
    ]


def _shell_inside(plan: LaunchPlan, command: Sequence[str]) -> list[str]:
    """The options and words of a shell in a new container like those of the ranks (pyxis)."""
    # The container of the ranks has no name by which another step could enter it.
    variables = [f"{name}={value}" for name, value in plan.env.items()]
    start = ("bash", "-c", 'cd "$0" && exec "$@"', plan.remote_dir)
    return [*plan.srun_container, "env", *variables, *start, *(command or ["bash"])]
