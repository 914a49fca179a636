"""The command line that all tasks share: a checkpoint, a config file, and overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trainer.checkpoint.manifest import NAME, read_manifest
from trainer.checkpoint.store import Store, unusable
from trainer.config import Resolved, read_run, resolve
from trainer.config.continuation import model_differences
from trainer.config.layers import Override
from trainer.config.task_config import task_tree
from trainer.errors import WRONG_USAGE, Finding, UserError, errors_in
from trainer.layout import Machines


class TaskParser(argparse.ArgumentParser):
    """Raises UserError for wrong arguments, as all our programs do."""

    def __init__(self, description: str, has_checkpoint: bool = True) -> None:
        super().__init__(
            prog=f"python -m trainer.tasks.{Path(sys.argv[0]).stem}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if has_checkpoint:
            self.add_argument(
                "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder of them"
            )
            self.add_argument("-c", "--config", metavar="FILE", help="run config: overrides values")
            self.add_argument(
                "-o",
                "--override",
                metavar="K=V",
                action="append",
                default=[],
                help="override a key",
            )

    def error(self, message: str) -> NoReturn:
        raise UserError(message, f"see {self.prog} --help", WRONG_USAGE)


class Opened(NamedTuple):
    """A checkpoint and its manifest."""

    folder: Path
    facts: dict[str, Any]


def open_checkpoint(path: str) -> Opened:
    """Find the newest usable checkpoint at a path: a checkpoint, or a folder of them."""
    where = Path(path)
    candidates = [where] if (where / NAME).exists() else Store(where).checkpoints()
    problems = [f"{folder.name}: {unusable(folder)}" for folder in candidates[:1]]
    for folder in candidates:
        if not unusable(folder):
            return Opened(folder, read_manifest(folder))
    reason = f": {problems[0]}" if problems else ""
    hint = "name the folder of a checkpoint, such as output/step_1000, or a folder of checkpoints"
    raise UserError(f"{where} contains no usable checkpoint{reason}", hint)


def task_config(
    opened: Opened, config: str | None, overrides: Sequence[str | Override], machines: Machines
) -> Resolved:
    """The config of the task. All mistakes are reported in one UserError."""
    found: list[Finding] = []
    saved, origin = opened.facts.get("config"), str(opened.folder / NAME)
    if not isinstance(saved, dict) or not isinstance(saved.get("Model"), dict):
        raise UserError(f"{origin} contains no config", "use a checkpoint of this program")
    typed = [Override.parse(each) if isinstance(each, str) else each for each in overrides]
    tree = task_tree(saved, origin, config, typed, found)
    source = config or str(opened.folder)
    if tree is None:
        raise UserError(f"{source}: invalid config", findings=found)
    resolved = resolve(read_run(tree, found, unread=("Launch",)), machines)
    if errors_in(resolved.findings):
        raise UserError(f"{source}: invalid config", findings=resolved.findings)
    if different := model_differences(saved["Model"], asdict(resolved.run.Model)):
        message = f"{opened.folder} is a checkpoint of another model: {'; '.join(different)}"
        raise UserError(message, "leave Model as it is in the checkpoint")
    return resolved
