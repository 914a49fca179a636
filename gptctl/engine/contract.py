"""What gptctl, its scripts and the trainer agree on: variables, exit codes, and file names.

Templates and the trainer repeat these as literals: they cannot import this module on a node.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # ask the job to save and stop

# Variables. GPTCTL_RUN_DIR is in the environment of all processes of a job: it identifies them.
RUN_DIR_VARIABLE = "GPTCTL_RUN_DIR"
# The file descriptor on which a supervisor tells gptctl that the job exists.
READY_VARIABLE = "GPTCTL_READY"
# The file descriptor from which the engine reads the environment of the batch script.
BATCH_ENVIRONMENT_VARIABLE = "GPTCTL_BATCH_ENVIRONMENT"
# Set for a job of a chain: it resumes what is in its output folder, as a restarted attempt does.
CONTINUES_VARIABLE = "GPTCTL_CONTINUES"
# Set while an agent must remove the files that gptctl sent to its host.
ROLL_BACK_VARIABLE = "GPTCTL_ROLL_BACK"
# Who is told about the jobs of a user: a URL, or the value of `Launch.notify`.
NOTIFY_VARIABLE = "GPTCTL_NOTIFY"
# The secret with which the trainer signs checkpoints.
CHECKPOINT_KEY_VARIABLE = "GPTCTL_CHECKPOINT_KEY"

# Exit codes of launch.sh, job.sbatch and agents, besides those of torchrun.
NO_ENGINE_PYTHON = 72  # job.sbatch found no Python that can run the engine
CANNOT_CREATE = 73  # a folder of the job cannot be created or entered
CANNOT_UNPACK = 74  # the job's archive arrived incomplete
CANNOT_START = 78  # a line of the setup failed, or a folder or a secret is missing
NO_SUCH_JOB = 66  # ask_host.sh, remove_job.sh: the host has nothing of the job
STILL_RUNNING = 75  # remove_job.sh: processes of the job are running
# Exit codes of a rank.
PEER_FAILED = 3  # another rank failed, is missing or never connected
UNRECOVERABLE = 93  # a restart would fail in the same way

# Files of a run folder; `run_folder.py` describes what each of them contains.
CLAIM = "claim.json"
RESULT = "result.json"
PLAN = "plan.json"
CANCELLED_FILE = "cancelled"
WAITING = "waiting"
EVENTS = "events.jsonl"  # also of the trainer, in its output folder
ALIVE = "alive.json"
NOTIFICATIONS = "notifications"  # a folder: see `deliveries.py`
LAST_STEP = "last-step"  # in the folder of an attempt: the last step that the trainer completed
TOKEN = ".token"  # nosec B105  # the name of a file
ENGINE_FILE = "engine.pyz"  # the engine, as it was when the job was submitted
STARTUP_FOLDER = "python"  # first in the search path of the ranks while their Python starts
LAUNCH_SCRIPT, BATCH_SCRIPT, AGENT_SCRIPT = "launch.sh", "job.sbatch", "agent.sh"
ARRAY_MEMBERS = "members"  # in the folder of an array: the run folders of its jobs
# The folder of an attempt, exactly as gptctl names it: others may hold copies of a user.
ATTEMPT_NAME = r"attempt-(0|[1-9][0-9]{0,5})"
OUTCOME = "outcome.json"  # in the folder of an attempt: how it ended, and its first failure
UNRECOVERABLE_FILE = "unrecoverable"  # in the folder of an attempt: see UNRECOVERABLE
