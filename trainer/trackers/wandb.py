"""Weights & Biases. Offline unless its own settings say where to: a mode, or a key."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

from trainer.trackers.tracked_run import PROJECT, TrackedRun

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        # It would report its errors to another service, also offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        given = os.environ.get("WANDB_MODE")
        own: Literal["online", "offline"] = "online" if _has_key() else "offline"
        if (given or own) != "online":
            # In a pod it would ask Kubernetes for its image, and send the pod's token for that.
            os.environ.setdefault("WANDB_DOCKER", "")
        import wandb

        self._run = wandb.init(
            id=run.id,
            name=os.environ.get("WANDB_NAME") or run.id,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config=dict(run.config),
            allow_val_change=True,  # a job that continues another may change keys
            resume="allow",
            mode=None if given else own,
            # The output is in the job's log, and the code in its run folder.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        folder = os.path.dirname(self._run.dir)
        offline = f"offline in {folder}, upload it with `wandb sync {folder}`"
        self.where = f"run {run.id}, {offline if self._run.offline else self._run.url}"

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        # Records of one step become one row; those of a step before the last are ignored.
        self._run.log(dict(values), step=step)

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


def _has_key() -> bool:
    """Whether `wandb login` was called, or a key is in the environment."""
    if any(os.environ.get(name) for name in KEYS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    return False
