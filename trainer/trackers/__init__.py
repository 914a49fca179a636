"""Trackers: programs and services that draw the curves of a run, and their packages. Torch-free.

The first rank writes records to a process per tracker (`processes.py`), which sends them on
(`__main__.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.errors import install_line

# The names in `Engine.trackers`, and what each of them needs.
PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
}
INSTALL = install_line("track")


def missing_packages(names: Iterable[str]) -> list[str]:
    """Which of these trackers have no package here. Imports none of them: that takes seconds."""
    from importlib.util import find_spec

    return [name for name in names if find_spec(PACKAGES[name]) is None]
