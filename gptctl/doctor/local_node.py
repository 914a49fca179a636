"""Run the doctor's script on the one node of a local cluster: this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gptctl.backends.local import LOOPBACK
from gptctl.doctor.probe import NODE_SCRIPT
from gptctl.doctor.signals import signals_blocked
from gptctl.engine.file_reading import read_text
from gptctl.engine.ports import free_port
from gptctl.engine.processes import clean_environment, kill_all

TIMEOUT = 120.0  # seconds


def run_script(folder: Path, action: str, **variables: str) -> None:
    """Run the node's script, and kill all its processes before returning."""
    own = {
        "GPTCTL_NODE": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
        **variables,
    }
    # Its own session: a Ctrl-C must reach gptctl only, which then kills the script.
    with subprocess.Popen(
        ["bash", str(folder / NODE_SCRIPT), action],
        env={**clean_environment(), **own},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            (folder / f"{action}.failed").write_text(f"it did not finish in {TIMEOUT:.0f} s")
        finally:
            with signals_blocked():
                process.kill()
                kill_all(str(folder))  # ranks have sessions of their own


def visible_to_torch(folder: Path) -> str:
    """The number of GPUs in the node's facts; empty if it has no torch."""
    return read_text(folder / "node.0.gpus").strip()


def host_name() -> str:
    return os.uname().nodename
