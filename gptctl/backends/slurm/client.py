"""Run Slurm's commands, and tell refused requests from those that may have succeeded.

Where they run is the caller's choice: on this machine, or on a login host.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from shutil import which
from typing import NamedTuple

from gptctl.deadline import Deadline
from gptctl.engine.processes import clean_environment
from trainer.errors import OUT_OF_REACH, UserError

TIMEOUT = 30.0  # seconds; a command of Slurm gives up earlier by itself
SUBMIT_TIMEOUT = 60.0  # seconds for sbatch: a busy controller may need them, and doubt is expensive
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

    `is_doubtful`: Slurm may have processed the request; `is_missing`: Slurm is not installed here;
    `is_answer`: it was Slurm that refused, not the way to it; `is_silent`: nobody answered for as
    long as gptctl waits, so that asking again would only take as long once more.
    """

    def __init__(
        self,
        said: str,
        is_doubtful: bool,
        is_missing: bool = False,
        hint: str = "",
        is_answer: bool = True,
        is_silent: bool = False,
    ) -> None:
        usual = "`sinfo` shows partitions and limits; `gptctl doctor --cluster NAME` checks more"
        if is_missing:
            usual = "run this command on a login node of the cluster, or set login in its profile"
        elif is_doubtful:
            usual = "try again later; `scontrol ping` shows whether the controller is up"
        super().__init__(f"Slurm: {said}" if is_answer else said, hint or usual, OUT_OF_REACH)
        self.detail, self.is_doubtful, self.is_missing = said, is_doubtful, is_missing
        self.is_answer = is_answer and not is_doubtful and not is_missing
        self.is_silent = is_silent


class ClientResult(NamedTuple):
    """How a command exited, and what it printed. A negative code: it was killed."""

    code: int
    out: str
    err: str


# Runs a command with this stdin; raises SlurmError if there is no result.
Execute = Callable[[Sequence[str], str], ClientResult]


def execute_here(command: Sequence[str], stdin: str, timeout: float = TIMEOUT) -> ClientResult:
    try:
        return _run(command, stdin, timeout)
    except FileNotFoundError:
        said = f"{command[0]} is not installed here"
        raise SlurmError(said, is_doubtful=False, is_missing=True) from None
    except subprocess.TimeoutExpired:
        said = f"{command[0]} got no answer in {timeout:.3g} s"
        raise SlurmError(said, is_doubtful=True, is_silent=True) from None


def _run(command: Sequence[str], stdin: str, timeout: float) -> ClientResult:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Variables of a surrounding job would change what the command does.
        env=clean_environment(),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout)
        except BaseException:
            # Clusters wrap these commands in scripts: what those started must not stay, either.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return ClientResult(process.returncode, out, err)


class SlurmClient:
    """Slurm's commands, on this machine or wherever `execute` runs them."""

    def __init__(self, execute: Execute | None = None, limit: Deadline | None = None) -> None:
        """`limit`: when the command that asks has to end, if it has to."""
        self._execute_there, self.is_here = execute, execute is None
        self._limit = limit or Deadline()
        self._silence: tuple[SlurmError, Deadline] | None = None  # and how long it is believed

    def _execute(self, command: Sequence[str], stdin: str) -> ClientResult:
        # Nobody answers: do not wait for each of ten commands. Whoever follows a job asks later.
        # But a request to stop a job is always sent.
        if self._silence and self._silence[1].left and command[0] != "scancel":
            raise self._silence[0]
        try:
            if self._execute_there:
                return self._execute_there(command, stdin)
            return execute_here(command, stdin, min(TIMEOUT, self._limit.left))
        except SlurmError as error:
            if error.is_silent:
                self._silence = error, Deadline(TIMEOUT)
            raise

    @property
    def my_jobs(self) -> str:
        """The option of squeue for the jobs of this user."""
        # --me is newer than some clusters, but this machine does not know the user's id elsewhere.
        return f"--user={os.getuid()}" if self.is_here else "--me"

    def run(self, *command: str) -> str:
        """Return what a command prints; raise SlurmError with its message if it fails."""
        return self._done(command).out

    def has(self, command: str) -> bool:
        """Whether a command is installed."""
        if self.is_here:
            return which(command) is not None
        return not self._execute(["bash", "-c", 'command -v "$1"', "bash", command], "").code

    def would_start(self, script: str, *options: str) -> str:
        """Return when and where Slurm would start a batch script; raise SlurmError if never."""
        # With --test-only sbatch prints its answer to stderr.
        said = error_text(self._done(["sbatch", "--test-only", *options], script).err)
        return re.sub(r"^Job \d+ to start at (\S+)T", r"would start at \1 ", said)

    def _done(self, command: Sequence[str], stdin: str = "") -> ClientResult:
        done = self._execute(command, stdin)
        if done.code:
            said = error_text(done.err or done.out)
            said = said or f"{command[0]} exited with code {done.code}"
            # A command that was killed may have sent its request before.
            raise failure(said, is_killed=done.code < 0)
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
