"""One node of a job on this machine: `launch.sh` and everything it starts, one attempt at a time.

Knows only the run folder. The supervisor calls it directly, or through the agent of an ssh host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptctl.engine.cause import Cause
from gptctl.engine.contract import LAUNCH_SCRIPT, RUN_DIR_VARIABLE
from gptctl.engine.file_reading import size_of
from gptctl.engine.first_failure import cause_on_nodes, tail
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import kill_all, processes_of, send
from gptctl.engine.run_folder import RunFolder

if TYPE_CHECKING:
    import subprocess

TICK = 0.05  # seconds between two checks of a node


class NodeExit(NamedTuple):
    """How a node exited."""

    code: int
    cause: Cause | None = None  # the first failure there, if it failed
    is_unrecoverable: bool = False  # a rank reported that a restart would fail in the same way
    time: float = 0.0  # when it exited, if that is known; else the order of detection counts
    never_started: bool = False
    was_stopped: bool = False  # the supervisor stopped it, because another node failed


class Node:
    """A node of a job whose processes run on this machine."""

    def __init__(self, plan: LaunchPlan, number: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self._plan, self._folder = plan, RunFolder(plan.remote_dir)
        self._environment = dict(environment)
        self._attempt, self._log_start = -1, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_is_requested = False
        self._exit: NodeExit | None = None

    def set_variable(self, name: str, value: str) -> None:
        """Set a variable in the environment of the next attempts."""
        self._environment[name] = value

    def start(self, attempt: int, host: str, port: int) -> None:
        """Start launch.sh. The same attempt is started again if its port was taken."""
        # Imported late: an agent is ready sooner.
        import subprocess

        self._attempt, self._stop_is_requested, self._exit = attempt, False, None
        # Files of an earlier start of this attempt would be read as those of this one.
        self._folder.forget_node(attempt, self.number)
        log_file = node_log(self._plan, attempt, self.number)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = size_of(log_file)
        own = {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "GPTCTL_NODE": self.number,
            "GPTCTL_ATTEMPT": attempt,
            RUN_DIR_VARIABLE: self._plan.remote_dir,
        }
        with open(log_file, "ab") as log:
            self._process = subprocess.Popen(
                ["bash", "--norc", os.path.join(self._plan.remote_dir, LAUNCH_SCRIPT)],
                env={**self._environment, **texts(own)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Signals of a terminal must not reach the job.
                start_new_session=True,
            )

    def exited(self) -> NodeExit | None:
        """Return how it exited, or None while it runs."""
        code = self._process.poll() if self._process else 0
        if code is None:
            return None
        # Only once: finding the cause reads logs.
        self._exit = self._exit or self._describe(code if code >= 0 else 128 - code)
        return self._exit

    def _describe(self, code: int) -> NodeExit:
        # A launch.sh that was asked to stop exits with 0; the recorded code is torchrun's.
        recorded = self._folder.exit_codes(self._attempt, [self.number])
        code = recorded.get(self.number, code)
        codes, logs = {self.number: code}, self._plan.log_dir
        cause = cause_on_nodes(self._folder, self._attempt, logs, codes, self.number)
        return NodeExit(code, cause, self._folder.is_unrecoverable(self._attempt))

    def has_ranks(self) -> bool:
        """Whether ranks of this attempt have started here."""
        return self._folder.has_ranks(self._attempt)

    def can_stop_gracefully(self) -> bool:
        """Whether a stop request would let anything here save its work."""
        return self.has_ranks()

    def request_stop(self) -> None:
        """Send SIGTERM to torchrun if it runs; it passes the signal to its ranks, which save."""
        torchrun = self._folder.torchruns(self._attempt).get(self.number)
        if torchrun is None or self._stop_is_requested or self.exited():
            return
        # Only once: a second signal would interrupt a torchrun that is stopping its ranks.
        self._stop_is_requested = True
        # A suspended process could not react to the signal.
        for pid in processes_of(self._plan.remote_dir):
            send(pid, signal.SIGCONT)
        send(torchrun, signal.SIGTERM)

    def begin_kill(self) -> None:
        """Ask for what `kill` does, without waiting: nothing to ask for here."""

    def kill(self) -> bool:
        """Kill every process of the job on this machine; return whether none is left."""
        # Also descendants of this process: they may have removed the variable that marks them.
        left = kill_all(self._plan.remote_dir, os.getpid())
        if self._process and self._process.pid not in left:
            self._process.wait()
        return not left

    def is_lost(self) -> bool:
        """Whether its host is lost, so that no attempt can start there."""
        return False

    def output(self) -> str:
        """Return what launch.sh has printed since this start."""
        log = node_log(self._plan, self._attempt, self.number)
        return tail(log, self._log_start)


def node_log(plan: LaunchPlan, attempt: int, node: int) -> Path:
    return Path(plan.log_dir) / f"attempt-{attempt}" / f"node.{node}.log"


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
