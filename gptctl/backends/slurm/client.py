"""Run Slurm's commands and understand how they fail."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from gptctl.engine.processes import clean_environment
from trainer.errors import OUT_OF_REACH, UserError

PATIENCE = 60.0  # of one client; by then it has given up itself
# What a client says when it cannot tell what became of its request. Whole phrases: it also repeats what the user typed.
_OUT_OF_REACH = re.compile(
    r"socket timed out|operation timed out|unable to contact|connection (refused|reset|timed out)|zero bytes were|"
    r"communication (connection )?(failure|shutdown)|transport endpoint|not responding|temporarily unable|broken pipe|"
    r"protocol authentication|munge encode failed|munge decode failed|unexpected message",
    re.IGNORECASE,
)


class SlurmError(UserError):
    """A client failed. `is_doubtful`: what it asked for may have happened; `is_missing`: there is no such client."""

    def __init__(self, said: str, is_doubtful: bool, is_missing: bool = False) -> None:
        hint = "sinfo shows partitions and their limits; gptctl doctor --cluster looks at more"
        if is_missing:
            hint = "ask on a login node of the cluster"
        elif is_doubtful:
            hint = "ask again in a while; scontrol ping"
        super().__init__(f"Slurm: {said}", hint, OUT_OF_REACH)
        self.said, self.is_doubtful, self.is_missing = said, is_doubtful, is_missing


def run(*command: str) -> str:
    """What a client prints; raises SlurmError with what it says when it fails."""
    return _done(command).stdout


def _done(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            timeout=PATIENCE,
            env=environment,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise SlurmError(
            f"there is no {command[0]} here", is_doubtful=False, is_missing=True
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} got no answer in {PATIENCE:.0f} s", is_doubtful=True
        ) from None
    if done.returncode:
        said = (
            said_by(done.stderr or done.stdout)
            or f"{command[0]} ended with exit code {done.returncode}"
        )
        raise failure(said, is_killed=done.returncode < 0)
    return done


def failure(said: str, is_killed: bool = False) -> SlurmError:
    """What a client's words mean."""
    is_missing = "configuration source" in said  # it is installed, but belongs to no cluster
    return SlurmError(
        said, not is_missing and (is_killed or bool(_OUT_OF_REACH.search(said))), is_missing
    )


def said_by(text: str) -> str:
    """The words of a client, without its own name before them."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def would_start(script: str) -> str:
    """When and where Slurm would start a batch script; raises SlurmError with its reason when it would not."""
    said = said_by(_done(["sbatch", "--test-only"], script).stderr)
    return re.sub(r"^Job \d+ to start at (\S+)T", r"would start at \1 ", said)
