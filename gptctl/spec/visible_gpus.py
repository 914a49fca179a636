"""How many GPUs of this machine a job may use. Never imports torch: that takes seconds."""

from __future__ import annotations

import os
from pathlib import Path


def count_visible_gpus() -> int:
    """Count the GPUs of this machine that a job may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # An empty value and -1 hide all GPUs, as in CUDA itself.
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
