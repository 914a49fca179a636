"""The config of a task with a trained model: that of its checkpoint, a file, and overrides.

Torch-free: the task itself and gptctl, which checks the layout before anything is queued, read it
by this one definition.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.config.layers import Override, load_tree, merge, with_overrides
from trainer.config.tasks import of_any_task
from trainer.config.tree import Map, ReadFile, parse
from trainer.errors import Finding, Place

# What a task takes from the run that wrote the checkpoint. The layout and the batch sizes are those
# of the task itself: by default one process.
INHERITED = {
    "Global": ("device", "seed"),
    "Engine": ("mix_precision", "tf32"),
    "Model": None,
    "Data": None,
    "Generation": None,
    "Offline_Eval": None,
}


def task_tree(
    saved: Mapping[str, Any],
    origin: str,
    path: str | os.PathLike[str] | None,
    overrides: Iterable[Override],
    found: list[Finding],
    files: list[ReadFile] | None = None,
) -> Map | None:
    """Merge the config that a checkpoint contains (`origin`: its manifest), a file and overrides.

    None if the file has no usable tree.
    """
    inherited = parse(json.dumps(_inherited(saved), ensure_ascii=False), origin, found)
    tree = load_tree(path, (), found, files) if path is not None else Map({}, Place(origin))
    if inherited is None or tree is None:
        return None
    merged = merge(inherited, of_any_task(tree), found)
    assert isinstance(merged, Map)
    return with_overrides(merged, overrides, found)


def _inherited(saved: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, keys in INHERITED.items():
        section = saved.get(name)
        if isinstance(section, Mapping):
            kept[name] = {key: section[key] for key in keys or section if key in section}
    # Layouts of the training that the task does not have: they are errors without their axis.
    for key in ("sequence_parallel", "virtual_pp_degree"):
        kept.get("Model", {}).pop(key, None)
    return kept
