"""Applies the axes of a layout to a model, in one named order. The model itself knows nothing of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.layout import DEGREE_KEYS, Layout
from trainer.mesh import Mesh
from trainer.model import GPT
from trainer.parallel.data import replicate


def check_built(layout: Layout) -> None:
    for axis in ("mp", "pp", "sharding"):
        if getattr(layout, axis) > 1:
            message = f"{DEGREE_KEYS[axis]} {getattr(layout, axis)}: the trainer cannot do this yet"
            raise UserError(message, "use dp_degree only")


def parallelize(model: GPT, run: RunConfig, mesh: Mesh) -> nn.Module:
    return replicate(model, run.Distributed.bucket_cap_mb, mesh) if mesh.layout.dp > 1 else model


def without_sync(model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
    """Gradients travel once per update: with the last micro-batch."""
    if is_last_micro_batch or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()  # type: ignore[operator]
