"""What the tasks that run a model have in common: the checkpoint, the ranks, and the network."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trainer.config.layers import Override
from trainer.config.sections import RunConfig
from trainer.corpus.tokenizer import Tokenizer
from trainer.inference.network import Network, load_network
from trainer.mesh import Mesh, join, machines
from trainer.out_of_memory import explained_task
from trainer.program import print_error
from trainer.tasks.arguments import Opened, open_checkpoint, task_config
from trainer.tasks.tokenizers import tokenizer_of
from trainer.watchdog import watched


def _more_ranks(mesh: Mesh) -> str:
    """How to divide the model among more ranks than now."""
    mp = 2 * mesh.layout.mp
    ranks = mesh.world // mesh.layout.mp * mp
    return f"use more ranks: --gpus-per-node {ranks} -o Distributed.mp_degree={mp}"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is ready to run on all ranks."""

    opened: Opened
    run: RunConfig
    mesh: Mesh
    network: Network
    tokenizer: Tokenizer

    @property
    def step(self) -> int:
        step = self.opened.facts.get("step")
        return step if isinstance(step, int) else 0

    def tell(self, text: str) -> None:
        """Say something on stderr, once for all ranks."""
        tell(text, self.mesh)


def tell(text: str, mesh: Mesh) -> None:
    if mesh.is_first:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def loaded(
    arguments: Namespace,
    overrides: Sequence[Override] = (),
    smaller: str = "",
    look: Callable[[RunConfig], None] = lambda run: None,
) -> Iterator[Loaded]:
    """Open the checkpoint of the arguments, join the other ranks, and load the network.

    `smaller`: what a user can reduce if the task needs too much memory. `look` checks the input of
    the task, before a large model is loaded for nothing.
    """
    opened = open_checkpoint(arguments.checkpoint)
    typed = [*arguments.override, *overrides]
    resolved = task_config(opened, arguments.config, typed, machines())
    look(resolved.run)
    tokenizer = tokenizer_of(opened, arguments.tokenizer)
    with (
        join(resolved.run, resolved.layout) as mesh,
        watched(resolved.run, mesh, print_error),
        explained_task(mesh, f"reduce {smaller}, or {_more_ranks(mesh)}"),
    ):
        began = time.perf_counter()
        mesh.heartbeat.tick("loading the checkpoint")
        network = load_network(opened.folder, opened.facts, resolved.run, mesh)
        seconds = time.perf_counter() - began
        ranks = f" on {mesh.layout}" if mesh.world > 1 else ""
        tell(f"Loaded {opened.folder}{ranks} in {seconds:.1f} s.", mesh)
        yield Loaded(opened, _with_samples(resolved.run), mesh, network, tokenizer)


def _with_samples(run: RunConfig) -> RunConfig:
    """0 samples are none at the end of a training; a task that writes texts is asked for some."""
    count = run.Generation.num_return_sequences or 1
    return replace(run, Generation=replace(run.Generation, num_return_sequences=count))
