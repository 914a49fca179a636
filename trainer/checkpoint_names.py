"""Names of the files of a checkpoint, and what they tell without being opened. Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path

MANIFEST = "manifest.json"
STEP = re.compile(r"step_([0-9]+)")  # the name of a checkpoint
VERIFIED, DAMAGED = ".verified", ".damaged"  # suffixes of the empty files that record a result
METRICS = "metrics.jsonl"  # beside the checkpoints of a run
REPEATED_METRICS = "metrics.repeated.jsonl"  # records of steps that were trained again later
RANK_TIMES = "rank_times.jsonl"  # what each rank needed for a step, without waiting for others
# What a run uses besides its config: in the folder of the attempt, or without gptctl beside these.
ENVIRONMENT = "environment.json"
# A result of `trainer.tasks.evaluate`, beside them too. One file each: several programs can write
# them at once, and copies from several machines can be in one folder.
EVALUATION = re.compile(r"evaluation\.[0-9a-f]{16}\.json")
_DATA = (".safetensors", ".distcp", ".metadata")


def is_verified(folder: Path) -> bool:
    """Whether all files of a checkpoint were read back correctly. Opens no file."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False
    data = {name for name in names if name.endswith(_DATA)}
    return MANIFEST in names and bool(data) and all(f"{name}{VERIFIED}" in names for name in data)


def is_damaged(folder: Path) -> bool:
    """Whether a rank found damage when it read its file back."""
    return any(folder.glob(f"*{DAMAGED}"))
