"""Become a shell or a command on a node of a job: engine.pyz node_shell RUN_DIR NODE [COMMAND …]

It gets the environment of the ranks there, so that the setup of the profile has effect, and starts
in the run folder. It is a process of the user, not of the job: stopping the job leaves it alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from gptctl.engine.contract import RUN_DIR_VARIABLE, STARTUP_FOLDER
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import exit_with_parent
from gptctl.engine.ranks_here import environment_of, live_ranks
from gptctl.engine.run_folder import RunFolder, read_plan

# A program that the user starts must not take itself for a rank, nor gptctl take it for the job.
OF_RANKS = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT"
).split()
# What belongs to the session of the user, not to the job.
OF_SESSION = "TERM SHELL HOME USER LOGNAME SSH_TTY SSH_CONNECTION SSH_AUTH_SOCK COLUMNS".split()


def shell_environment(
    plan: LaunchPlan, own: Mapping[str, str], ranks: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a shell: that of a rank, or of this process if none runs here."""
    # Paths of a container are not valid outside of it.
    base = dict(own) | dict(plan.env) if plan.is_in_container or not ranks else dict(ranks)
    base |= {name: own[name] for name in OF_SESSION if name in own}
    startup = os.path.join(plan.remote_dir, STARTUP_FOLDER)
    path = [each for each in base.pop("PYTHONPATH", "").split(os.pathsep) if each != startup]
    if any(path):
        base["PYTHONPATH"] = os.pathsep.join(path)
    # The environment of a forked rank is that of torchrun.
    dropped = (*OF_RANKS, RUN_DIR_VARIABLE, "GPTCTL_FORK_RANKS")
    return {
        name: value
        for name, value in base.items()
        if name not in dropped and not name.startswith("TORCHELASTIC_")
    }


def main() -> None:
    run_dir, number, *command = sys.argv[1:]
    # If the connection breaks, nothing stays here.
    exit_with_parent()
    plan, folder = read_plan(RunFolder(run_dir).path), RunFolder(run_dir)
    pids = [found.pid for found in live_ranks(folder) if found.node == int(number)]
    environment = shell_environment(plan, os.environ, environment_of(pids[0]) if pids else {})
    command = command or [environment.get("SHELL") or "bash"]
    os.chdir(run_dir)
    # Python and agent.sh ignore it; a shell pipeline needs it.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
