"""Dropout that depends only on seed, step, micro-batch and layer, not on layout or restarts.

The generator is seeded again before every layer, so a pipeline stage draws the same numbers as a
single process does for that layer. The seed of a layer is the seed of the previous layer plus one.
It is part of the generator's state, which recomputation restores, so recomputed layers draw the
same numbers again.
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

# Distance between the seeds of the ranks of an mp group: large, so that layers do not collide.
_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = (1 << 63) - 1  # torch accepts 64-bit seeds; keep them positive


class Dropout:
    """Seeds the generator for this rank's parts of the model."""

    def __init__(self, run: RunConfig, mesh: Mesh) -> None:
        self.is_on = bool(run.Model.hidden_dropout_prob or run.Model.attention_probs_dropout_prob)
        self.seed, self.step = run.Global.seed, 0
        self.first_micro_batch = mesh.data_rank * run.Engine.accumulate_steps
        # The ranks of an mp group hold the same hidden states and must drop the same elements.
        # With sequence parallelism they hold different parts of the sequence.
        self.offset = mesh.at.mp if run.Model.sequence_parallel else 0
        self.generator = default_generator(mesh.device)
        self._micro_batches: dict[nn.Module, int] = {}

    def begin(self, step: int) -> None:
        """Start the micro-batches of a step."""
        self.step, self._micro_batches = step, {}

    def attach(self, part: GPT) -> None:
        if self.is_on:
            part.register_forward_pre_hook(self._before_part)
            for block in part.layers.values():
                block.register_forward_pre_hook(self._before_layer)

    def _before_part(self, part: Any, _: Any) -> None:
        """Count micro-batches: every pipeline schedule runs those of a stage in order."""
        if not part.training:  # evaluation draws nothing, and must not count micro-batches
            return
        number = self._micro_batches[part] = self._micro_batches.get(part, -1) + 1
        key = f"{self.seed}:{self.step}:{self.first_micro_batch + number}"
        base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        seed = base + self.offset * _SEED_STRIDE + part.first_layer
        self.generator.manual_seed(seed & _SEEDS)

    def _before_layer(self, block: nn.Module, _: Any) -> None:
        if block.training:
            self.generator.manual_seed((self.generator.initial_seed() + 1) & _SEEDS)


@contextmanager
def own_stream(device: torch.device, mp_rank: int) -> Iterator[None]:
    """Use a random stream of this rank alone, for tensors that are split over an mp group."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed((generator.initial_seed() + (mp_rank + 1) * _SEED_STRIDE) & _SEEDS)
    yield
    generator.set_state(state)
