"""Randomness as a function of seed, step, micro-batch and layer: no layout and no restart changes what is dropped.

A stream is begun anew before every layer, so a pipeline stage draws what one process draws for the same layer. The seed
of a layer is that of the layer before plus one: it is part of the generator's state, so recomputation, which restores
that state, begins the same streams again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.config.sections import RunConfig
from trainer.device import default_generator
from trainer.mesh import Mesh
from trainer.model import GPT

_FAR = 0x9E3779B97F4A7C15  # between the seeds of the ranks of an mp group
_SEEDS = (1 << 63) - 1


class Dropout:
    """Begins the streams of this rank's parts of the model."""

    def __init__(self, run: RunConfig, mesh: Mesh) -> None:
        self.is_on = bool(run.Model.hidden_dropout_prob or run.Model.attention_probs_dropout_prob)
        self.seed, self.step = run.Global.seed, 0
        self.first_micro_batch = mesh.data_rank * run.Engine.accumulate_steps
        # Every rank of an mp group holds the same hidden states, unless it holds its own part of the sequence.
        self.offset = mesh.at.mp if run.Model.sequence_parallel else 0
        self.generator = default_generator(mesh.device)
        self._micro_batches: dict[nn.Module, int] = {}

    def begin(self, step: int) -> None:
        self.step, self._micro_batches = step, {}

    def attach(self, part: GPT) -> None:
        if self.is_on:
            part.register_forward_pre_hook(self._before_part)
            for block in part.layers.values():
                block.register_forward_pre_hook(self._before_layer)

    def _before_part(self, part: Any, _: Any) -> None:
        """Any schedule takes the micro-batches of a stage in their order: they are counted."""
        if not part.training:
            return
        number = self._micro_batches[part] = self._micro_batches.get(part, -1) + 1
        key = f"{self.seed}:{self.step}:{self.first_micro_batch + number}"
        base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        self.generator.manual_seed((base + self.offset * _FAR + part.first_layer) & _SEEDS)

    def _before_layer(self, block: nn.Module, _: Any) -> None:
        if block.training:
            self.generator.manual_seed((self.generator.initial_seed() + 1) & _SEEDS)


@contextmanager
def own_stream(device: torch.device, mp_rank: int) -> Iterator[None]:
    """A stream of this rank alone, for what the ranks of an mp group hold different parts of."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed((generator.initial_seed() + (mp_rank + 1) * _FAR) & _SEEDS)
    yield
    generator.set_state(state)
