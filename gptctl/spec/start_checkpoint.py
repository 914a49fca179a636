"""Compare a run with the checkpoint that it starts from, where this machine can see both.

The trainer refuses the same, but only after the job has waited in a queue.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import DamagedFile, load_json
from gptctl.engine.run_folder import checkpoint_steps
from gptctl.spec.check import NO_PATH, Checked
from gptctl.spec.machine_rules import prepared_with
from trainer.checkpoint_names import MANIFEST
from trainer.config.continuation import model_differences
from trainer.errors import Finding, Rule, UserError

START = Rule("S034", "a run must have the model and the tokenizer of the checkpoint in ckpt_dir")
KEY = "Engine.save_load.ckpt_dir"


def check_start(checked: Checked, folder: str = ".") -> Iterator[Finding]:
    """Report a checkpoint in `ckpt_dir` that the job would refuse."""
    is_trainer = checked.resolved is not None and checked.launch.entrypoint == "trainer"
    if not is_trainer or checked.resolved is None or not checked.cluster.sees_files:
        return
    path = checked.resolved.run.Engine.save_load.ckpt_dir
    facts = _facts_at(Path(folder, path)) if path and path not in NO_PATH else {}
    config = facts.get("config")
    model = config.get("Model") if isinstance(config, Mapping) else None
    if not isinstance(model, Mapping):
        return  # no checkpoint, or a damaged one: that is another message
    here = asdict(checked.resolved.run.Model)
    # Only the trainer counts the characters of a text.
    unknown = {key: None for key, value in here.items() if value is None}
    if different := model_differences({**model, **unknown}, here):
        message = f"{path} is a checkpoint of another model: {'; '.join(different)}"
        hint = "use the Model section of that run, or another ckpt_dir"
        yield START.found(KEY, path, message, hint, checked.place_of(KEY))
    yield from _check_tokenizer(checked, facts.get("tokenizer"), str(path), folder)


def _check_tokenizer(checked: Checked, saved: Any, path: str, folder: str) -> Iterator[Finding]:
    try:
        data = prepared_with(checked, folder)
    except UserError:  # from different tokenizers: S030
        return
    if data is None or not isinstance(saved, Mapping) or not isinstance(saved.get("digest"), str):
        return
    own = data.tokenizer
    if saved["digest"] != own["digest"]:
        message = (
            f"{path} was trained with another tokenizer than that of {data.file}: "
            f"{saved.get('kind')} with {saved.get('vocab_size')} tokens there, "
            f"{own['kind']} with {own['vocab_size']} here"
        )
        hint = "prepare the data with the tokenizer of the checkpoint, or use another ckpt_dir"
        yield START.found(KEY, path, message, hint, checked.place_of(KEY))


def _facts_at(path: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint, or of the newest one in a folder; empty if there is none."""
    from trainer.checksums import LARGEST_MANIFEST

    try:
        steps = sorted(checkpoint_steps(os.listdir(path)), reverse=True)
    except OSError:
        return {}
    for place in (path, *(path / f"step_{step}" for step in steps)):
        try:
            return load_json(place / MANIFEST, LARGEST_MANIFEST)
        except (OSError, DamagedFile):
            continue
    return {}
