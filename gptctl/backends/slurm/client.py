"""Run Slurm's commands, and tell refused requests from those that may have succeeded."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from gptctl.engine.processes import clean_environment
from trainer.errors import OUT_OF_REACH, UserError

TIMEOUT = 60.0  # seconds; a command of Slurm gives up earlier by itself
# Errors after which Slurm may have processed the request nevertheless. Whole phrases, because error
# messages also repeat what the user typed.
_OUT_OF_REACH = re.compile(
    r"socket timed out|operation timed out|unable to contact|connection (refused|reset|timed out)|"
    r"zero bytes were|communication (connection )?(failure|shutdown)|transport endpoint|"
    r"not responding|temporarily unable|broken pipe|protocol authentication|"
    r"munge encode failed|munge decode failed|unexpected message",
    re.IGNORECASE,
)


class SlurmError(UserError):
    """A command of Slurm failed.

    `is_doubtful`: Slurm may have processed the request; `is_missing`: Slurm is not installed here.
    """

    def __init__(self, said: str, is_doubtful: bool, is_missing: bool = False) -> None:
        hint = "`sinfo` shows partitions and limits; `gptctl doctor --cluster NAME` checks more"
        if is_missing:
            hint = "run this command on a login node of the cluster"
        elif is_doubtful:
            hint = "try again later; `scontrol ping` shows whether the controller is up"
        super().__init__(f"Slurm: {said}", hint, OUT_OF_REACH)
        self.detail, self.is_doubtful, self.is_missing = said, is_doubtful, is_missing


def run(*command: str) -> str:
    """Run a command and return what it prints; raise SlurmError with its message if it fails."""
    return _done(command).stdout


def _done(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    # Variables of a surrounding job would change what the command does.
    environment = clean_environment()
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            timeout=TIMEOUT,
            env=environment,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        said = f"{command[0]} is not installed here"
        raise SlurmError(said, is_doubtful=False, is_missing=True) from None
    except subprocess.TimeoutExpired:
        said = f"{command[0]} got no answer in {TIMEOUT:.0f} s"
        raise SlurmError(said, is_doubtful=True) from None
    if done.returncode:
        said = error_text(done.stderr or done.stdout)
        said = said or f"{command[0]} exited with code {done.returncode}"
        # A command that was killed may have sent its request before.
        raise failure(said, is_killed=done.returncode < 0)
    return done


def failure(said: str, is_killed: bool = False) -> SlurmError:
    """Classify the error message of a command."""
    # The commands are installed, but not configured for any cluster.
    is_missing = "configuration source" in said
    is_doubtful = not is_missing and (is_killed or bool(_OUT_OF_REACH.search(said)))
    return SlurmError(said, is_doubtful, is_missing)


def error_text(text: str) -> str:
    """Return the error messages of a command in one line, without the name of the command."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def would_start(script: str) -> str:
    """Return when and where Slurm would start a batch script; raise SlurmError if it rejects it."""
    # With --test-only sbatch prints its answer to stderr.
    said = error_text(_done(["sbatch", "--test-only"], script).stderr)
    return re.sub(r"^Job \d+ to start at (\S+)T", r"would start at \1 ", said)
