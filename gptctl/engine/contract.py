"""What gptctl, its scripts and the trainer agree on: variables, exit codes, and the names of files in a run folder.

Templates and the trainer write these as literals: neither can import this module on a node.
"""

from __future__ import annotations

# Variables. GPTCTL_RUN_DIR is in the environment of every process of a job, so that each can be found.
RUN_DIR_VARIABLE = "GPTCTL_RUN_DIR"
READY_VARIABLE = (
    "GPTCTL_READY"  # the descriptor on which a supervisor tells gptctl that the job exists
)
ROLL_BACK_VARIABLE = "GPTCTL_ROLL_BACK"  # set while an agent must remove what was sent to its host

# Exit codes of launch.sh, job.sbatch and agents, besides those of torchrun.
NO_ENGINE_PYTHON = 72  # job.sbatch found no Python that can run the engine
CANNOT_CREATE = 73  # a folder of the job cannot be created
CANNOT_UNPACK = 74  # the archive of a job did not arrive whole
CANNOT_START = 78  # a line of the setup failed, or a folder or a secret is missing
HOPELESS = 93  # of a rank: a restart would end the same way

# Files of a run folder; `run_folder.py` says what each of them holds.
CLAIM = "claim.json"
RESULT = "result.json"
PLAN = "plan.json"
CANCELLED_FILE = "cancelled"
TOKEN = ".token"
ENGINE_FILE = "engine.pyz"  # the engine, as it was when the job was submitted
LAUNCH_SCRIPT, BATCH_SCRIPT, AGENT_SCRIPT = "launch.sh", "job.sbatch", "agent.sh"
HOPELESS_FILE = "cannot-be-helped"  # in the folder of an attempt, written by the trainer
