"""Parts of a Slurm job that are killed on its first node. Oracle: the process table of every node."""

from __future__ import annotations

import pytest

from tests.integration.slurm.login import Login, await_true
from tests.lab import Lab

SECONDS = 60  # Slurm itself waits 30 between SIGTERM and SIGKILL


@pytest.mark.long
@pytest.mark.parametrize(
    "pattern",
    ["engine.pyz srun_node", "srun --nodes", "engine.pyz srun_node|srun --nodes"],
    ids=["supervisor", "srun", "both"],
)
def test_nothing_of_a_job_outlives_what_started_it(lab: Lab, pattern: str) -> None:
    """Slurm ends a step without its srun, and a job whose script has exited, on all nodes."""
    login = Login(lab)
    job = login.submit_quick("--nodes", "2", JOB_SECONDS="300")
    marked = f"grep -lszxF GPTCTL_RUN_DIR={job['run_dir']} /proc/[0-9]*/environ"
    hosts: list[str] = []

    def runs_on_both() -> bool:
        hosts[:] = login.json("status", job["job"])["hosts"]
        return len(hosts) == 2 and all("sleep" in left(login, host, marked) for host in hosts)

    await_true(runs_on_both, 60)
    lab.run(hosts[0], "pkill", "-9", "-f", pattern, check=True)
    await_true(lambda: not any(left(login, host, marked) for host in hosts), SECONDS)
    login.wait(job["job"], "FAILED", "NODE_FAIL", "CANCELLED")


@pytest.mark.long
def test_torchrun_exits_with_its_launch_script(lab: Lab) -> None:
    """Without cgroups Slurm follows parents: it loses a torchrun whose launch.sh was killed, and its ranks."""
    login = Login(lab)
    job = login.train("--nodes", "2", keys=["Engine.max_steps=1000000"])
    marked = f"grep -lszxF GPTCTL_RUN_DIR={job['run_dir']} /proc/[0-9]*/environ"
    await_true(lambda: "global step 3," in login.run("logs", job["job"]).stdout, 90)
    hosts = login.json("status", job["job"])["hosts"]
    lab.run(hosts[1], "pkill", "-9", "-f", f"{job['run_dir']}/launch.sh", check=True)
    await_true(lambda: not left(login, hosts[1], marked), 5, lambda: left(login, hosts[1], marked))
    login.wait(job["job"], "FAILED")
    await_true(lambda: not any(left(login, host, marked) for host in hosts), SECONDS)


def left(login: Login, host: str, marked: str) -> str:
    """The commands of the job's processes there."""
    names = f'for file in $({marked}); do cat "${{file%environ}}comm"; done 2> /dev/null'
    return str(login.lab.run(host, "bash", "-c", names, check=False).stdout)
