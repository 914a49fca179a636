"""gptctl runs on the cluster: Slurm's commands are here, and nodes see the folders of jobs.

The only module that imports submitit.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from gptctl.backends.slurm import client
from gptctl.backends.slurm.client import SlurmClient, SlurmError
from gptctl.backends.slurm.options import submitted_comment
from gptctl.backends.slurm.queue import Queue
from gptctl.deadline import Deadline
from gptctl.engine.atomic_files import private_files
from gptctl.engine.contract import BATCH_SCRIPT
from gptctl.engine.file_reading import load_bytes
from gptctl.engine.job_result import Result
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import clean_environment
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.remote.parallel import bounded

KILL_TIME = 3.0  # seconds in which a command that is killed has usually exited


class DirectAccess:
    """See `Access`. The job's folder on this machine is the one that its nodes use."""

    def __init__(self, limit: Deadline | None = None) -> None:
        self.client = SlurmClient(limit=limit)
        self.queue = Queue(self.client)

    def connect(self, record: JobRecord) -> None:
        return

    def was_sent(self, record: JobRecord) -> bool:
        return True

    def send_folder(self, plan: LaunchPlan, record: JobRecord) -> None:
        with private_files():
            # Slurm opens its log file there before the job starts.
            os.makedirs(plan.log_dir, exist_ok=True)
            os.makedirs(_submitit_folder(plan.remote_dir), exist_ok=True)

    def sbatch(self, plan: LaunchPlan, record: JobRecord) -> str:
        comment = submitted_comment(plan, record.token)
        return sbatch_script(os.path.join(plan.remote_dir, BATCH_SCRIPT), comment)

    def claim(self, record: JobRecord, claim: Mapping[str, Any]) -> dict[str, Any]:
        folder = RunFolder(record.local_dir)
        folder.try_claim(claim)
        return folder.claimed_by() or {}

    def forbid_attempts(self, record: JobRecord, now: bool) -> None:
        RunFolder(record.local_dir).cancel(now)

    def remove_folder(self, record: JobRecord) -> None:
        return

    def update(self, record: JobRecord) -> None:
        return

    def final_result(self, record: JobRecord) -> Result | None:
        return RunFolder(record.local_dir).result()

    def command(self, words: Sequence[str], has_terminal: bool) -> list[str]:
        return list(words)


def sbatch_script(script: str, comment: str) -> str:
    """Submit a script held; return Slurm's id of the job or array."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    folder = _submitit_folder(os.path.dirname(script))

    class ScriptExecutor(SlurmExecutor):
        """Submits our script instead of a pickled function."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return load_bytes(Path(script)).decode()

        def _make_submission_command(self, submission_file_path: Any) -> list[str]:
            # On the command line, so that the script is exactly what --dry-run printed.
            own = ["--hold", f"--comment={comment}"]
            return [*_clean_prefix(), *_time_limit(), "sbatch", *own, str(submission_file_path)]

    deadline = Deadline(client.SUBMIT_TIMEOUT)
    try:
        # submitit prints the errors that it raises.
        with private_files(), redirect_stderr(io.StringIO()):
            executor = ScriptExecutor(folder)
            # Bounded, because nothing ends an sbatch that waits for a file system.
            last = Deadline(client.SUBMIT_TIMEOUT + KILL_TIME)
            return str(bounded(lambda: executor._submit_command(""), last).job_id)
    except (TimeoutError, FailedJobError, FailedSubmissionError) as error:
        # It may have submitted the job nevertheless, which is held, and found by its token.
        if not deadline.left:
            said = f"sbatch got no answer in {client.SUBMIT_TIMEOUT:.0f} s"
            raise SlurmError(said, is_doubtful=True, is_silent=True) from None
        said = client.error_text(str(error)) or "sbatch was killed"
        raise client.failure(said) from None
    # submitit raises it where srun is not installed.
    except RuntimeError as error:
        said = f"Slurm is not installed here: {error}"
        raise SlurmError(said, is_doubtful=False, is_missing=True) from None


def _submitit_folder(folder: str) -> str:
    """Return the folder where submitit keeps the script as it was submitted."""
    return os.path.join(folder, "submitit")


def _time_limit() -> list[str]:
    """End sbatch, and what a script in its place has started: submitit would wait forever."""
    return ["timeout", "--kill-after=1", str(client.SUBMIT_TIMEOUT)]


def _clean_prefix() -> list[str]:
    """Drop variables that sbatch would take for the job's own."""
    # submitit starts sbatch with the environment of this process, so `env` has to remove them.
    clean = clean_environment()
    dropped = [word for name in os.environ if name not in clean for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in clean.items() if value != os.environ[name]]
    return ["env", *dropped, *changed]
