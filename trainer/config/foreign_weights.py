"""Recognises weights of other programs where a checkpoint is expected. Torch-free.

The trainer looks when it starts, and gptctl before it submits a job.
"""

from __future__ import annotations

import os
import shlex

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# What the folders of Hugging Face, nanoGPT and Megatron contain, and no folder of ours.
SIGNS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "ckpt.pt",
    "mp_rank_00",
    "latest_checkpointed_iteration.txt",
)
MANIFEST = "manifest.json"


def foreign_weights(path: str) -> str:
    """What is wrong with a path to start from, if weights of another program are there."""
    if os.path.isfile(path) and path.endswith(SUFFIXES):
        return f"{path} is a file with weights, not a checkpoint of this program"
    found = [name for name in SIGNS if os.path.lexists(os.path.join(path, name))]
    if not found or os.path.lexists(os.path.join(path, MANIFEST)):
        return ""
    return f"{path} contains weights of another program ({found[0]}), not a checkpoint"


def import_hint(path: str) -> str:
    """The command that makes a checkpoint of these weights."""
    folder = path.rstrip("/")
    for suffix in SUFFIXES if os.path.isfile(path) else ():
        folder = folder.removesuffix(suffix)
    command = shlex.join(["gptctl", "import", path, "--output", f"{folder}-checkpoint"])
    return f"import them first: {command}; then set ckpt_dir to {folder}-checkpoint"
