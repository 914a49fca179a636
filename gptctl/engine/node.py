"""One node of a job on this machine: `launch.sh` and everything that it starts, from one attempt to the next.

Knows the run folder only. Whoever keeps the attempts in step (`supervisor.py`) calls it directly or over a wire.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import kill_all, processes_of, send
from gptctl.engine.run_folder import RunFolder, read_text

if TYPE_CHECKING:
    import subprocess


class Ended(NamedTuple):
    """How a node ended: its exit code, what it said last if it failed before it had a rank, whether starting again
    could help."""

    code: int
    last_words: str = ""
    is_hopeless: bool = False


class Node:
    def __init__(self, plan: LaunchPlan, number: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self._plan, self._folder = plan, RunFolder(plan.run_dir)
        self._environment = dict(environment)
        self._attempt, self._began_at = -1, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked = False

    def start(self, attempt: int, host: str, port: int) -> None:
        """A second start of the same attempt is one whose port was taken."""
        import subprocess  # by the first start, not by what waits for it

        self._attempt, self._is_asked = attempt, False
        for stale in self._folder.attempt(attempt).glob(f"node.{self.number}.*"):
            stale.unlink()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._began_at = len(read_text(self._log))
        own = {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "GPTCTL_NODE": self.number,
            "GPTCTL_ATTEMPT": attempt,
        }
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                ["bash", "--norc", os.path.join(self._plan.run_dir, "launch.sh")],
                env={**self._environment, **_texts(own), "GPTCTL_RUN_DIR": self._plan.run_dir},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> Ended | None:
        """None while it runs."""
        code = self._process.poll() if self._process else 0
        if code is None:
            return None
        code = code if code >= 0 else 128 - code
        last_words = self._last_words() if code and not self.has_ranks() else ""
        return Ended(code, last_words, self._folder.cannot_be_helped(self._attempt))

    def has_ranks(self) -> bool:
        """Whether ranks of this attempt have started here."""
        return bool(self._folder.rank_events(self._attempt))

    def ask(self) -> None:
        """Tells torchrun to end, once it is there; the ranks get the signal from it, and time to save."""
        torchrun = self._folder.torchruns(self._attempt).get(self.number)
        if torchrun is None or self._is_asked or self.ended():
            return
        self._is_asked = True
        for pid in processes_of(self._plan.run_dir):  # one that is stopped could not answer
            send(pid, signal.SIGCONT)
        send(torchrun, signal.SIGTERM)

    def kill(self) -> None:
        """Ends every process of the job on this machine; returns when none is left."""
        kill_all(self._plan.run_dir, os.getpid())
        if self._process:
            self._process.wait()

    def said(self) -> str:
        """What the node itself said since this start."""
        return read_text(self._log)[self._began_at :]

    @property
    def _log(self) -> Path:
        return Path(self._plan.log_dir) / f"attempt-{self._attempt}" / f"node.{self.number}.log"

    def _last_words(self) -> str:
        return next(
            (line.strip()[:200] for line in reversed(self.said().split("\n")) if line.strip()), ""
        )


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
