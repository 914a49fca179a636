"""What may change between a checkpoint and the run that resumes from it. Torch-free.

The trainer checks it when it loads a checkpoint, and gptctl before it submits the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What must be equal to load a checkpoint; dropout, recomputation and layout may change.
MODEL_KEYS = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size vocab_size "
    "vocab_size_divisible_unit max_position_embeddings"
).split()


def model_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say which sizes of the two models differ; an empty list if the checkpoint can be loaded."""
    return [
        f"{key} is {there.get(key)} there, {here[key]} here"
        for key in MODEL_KEYS
        if there.get(key) != here[key]
    ]
