"""Reaches the one node of a local cluster: this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gptctl.backends.local import LOOPBACK
from gptctl.doctor.probe import NODE_SCRIPT
from gptctl.doctor.signals import undisturbed
from gptctl.engine.ports import free_port
from gptctl.engine.processes import clean_environment, kill_all
from gptctl.engine.run_folder import read_text

PATIENCE = 120.0


def run_here(folder: Path, *words: str, **variables: str) -> None:
    """Runs the script of a node; none of its processes stays."""
    own = {
        "GPTCTL_NODE": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
        **variables,
    }
    command = ["bash", str(folder / NODE_SCRIPT), *words]
    with subprocess.Popen(
        command,
        env={**clean_environment(), **own},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            (folder / f"{words[0]}.failed").write_text(
                f"it did not come to an end in {PATIENCE:.0f} s"
            )
        finally:
            with undisturbed():
                process.kill()
                kill_all(str(folder))


def gpus_seen(folder: Path) -> str:
    """What the facts say; empty when there is no torch to ask."""
    return read_text(folder / "node.0.gpus").strip()


def this_host() -> str:
    return os.uname().nodename
