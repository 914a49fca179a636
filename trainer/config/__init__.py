"""Run configs: from YAML, JSON, flags and `-o` to a complete, checked `RunConfig`. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable

from trainer.config.layers import Override, load_tree
from trainer.config.resolve import Resolved, read_run, resolve
from trainer.config.sections import RunConfig
from trainer.errors import Finding, UserError, errors_in
from trainer.layout import Machines

__all__ = ["Override", "Resolved", "RunConfig", "load", "load_tree", "read_run", "resolve"]


def load(
    path: str | os.PathLike[str] | None,
    overrides: Iterable[Override] = (),
    machines: Machines | None = None,
) -> Resolved:
    """Load a run config for the trainer.

    All mistakes are reported in one UserError. The `Launch` section belongs to gptctl and is
    skipped.
    """
    found: list[Finding] = []
    tree = load_tree(path, overrides, found)
    source = path or "the command line"
    if tree is None:
        raise UserError(f"{source}: invalid config", findings=found)
    resolved = resolve(read_run(tree, found, unread=("Launch",)), machines)
    if errors_in(resolved.findings):
        raise UserError(f"{source}: invalid config", findings=resolved.findings)
    return resolved
