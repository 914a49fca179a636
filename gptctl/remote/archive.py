"""What is sent to other machines before a job starts there: its folder, and secrets."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from gptctl.engine.launch_plan import LaunchPlan

# Hosts do not need these, and the profile may name other machines.
NOT_SENT = ("written.json", "cluster.json", "git.json", "templates")
MIN_SPEED = 50_000  # bytes per second at which a job's folder must arrive


def pack(folder: Path) -> bytes:
    """Pack what a host needs of a job's folder."""
    stream = io.BytesIO()
    # A low level: the folder is small, and speed matters more than size.
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=3) as archive:
        for entry in sorted(folder.iterdir()):
            if entry.name not in NOT_SENT:
                archive.add(entry, entry.name)
    return stream.getvalue()


def secrets_of(plan: LaunchPlan) -> dict[str, str]:
    """Return the secrets from this environment; those in files are read on the hosts."""
    return {name: os.environ[name] for name in plan.secret_variables if name in os.environ}
