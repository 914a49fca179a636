"""Checkpoints of random models in any layout, without training one: for tests of export and import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.manifest import write_manifest
from trainer.checkpoint.tensor_files import file_name, tensor_index, write_pieces
from trainer.config import Override, load
from trainer.config.sections import Model, RunConfig
from trainer.layout import Machines
from trainer.model import GPT
from trainer.slices import Piece, Slice
from trainer.weights.checkpoint_weights import weight_shapes
from trainer.weights.families import HUGGING_FACE
from trainer.weights.importing import facts_of

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


@contextmanager
def one_thread() -> Iterator[None]:
    """While tasks run in this process: they set these variables, and tests after them must not see that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in THREADS.items():
            patch.setenv(name, value)
        yield
    torch.set_num_threads(threads)


# Nothing is a power of two or equal to something else by chance, and the vocabulary is padded.
SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 101, "max_position_embeddings": 20}
COLUMNS = ("out_proj.weight", "linear2.weight")  # what tensor parallelism cuts along the other dimension


def config(**model: Any) -> RunConfig:
    values = {"name": "GPT", **SMALL, **model}
    keys = [Override(f"Model.{key}", str(value), "test") for key, value in values.items()]
    length = Override("Data.Train.dataset.max_seq_len", str(values["max_position_embeddings"]), "test")
    return load(None, [*keys, length], Machines(1, 1)).run


def random_weights(model: Model, seed: int = 0, scale: float = 0.3) -> dict[str, Tensor]:
    """Large enough that attention is not uniform, and with biases that are not zero."""
    source = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(model)
    return {name: torch.randn(shape, generator=source) * scale for name, shape in shapes.items()}


def loaded_model(model: Model, weights: dict[str, Tensor]) -> GPT:
    gpt = GPT(model)
    gpt.load_state_dict(weights)
    return gpt.eval()


def write_model(
    folder: Path, run: RunConfig, weights: dict[str, Tensor], ranks: int = 1, optimizer: bool = True, **more: Any
) -> Path:
    """Write `step_7` with a file for each rank, cut as tensor parallelism does."""
    kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq") if optimizer else ("model",)
    folder.mkdir(parents=True)
    written = {}
    for rank in range(ranks):
        pieces = {f"{kind}.{name}": _cut(name, weights[name], ranks, rank) for kind in kinds for name in weights}
        held = {name: piece for name, piece in pieces.items() if piece.at.numel}
        written[file_name(rank)] = write_pieces(folder / file_name(rank), held)
    facts = {**facts_of(run, Path("test"), HUGGING_FACE, None), "step": 7, "has_optimizer": optimizer, **more}
    facts["tensors"] = tensor_index({name: each.tensors for name, each in written.items()})
    write_manifest(folder, facts, {name: each.facts for name, each in written.items()})
    return folder


def _cut(name: str, tensor: Tensor, ranks: int, rank: int) -> Piece:
    at = Slice.of(tuple(tensor.shape))
    dim = 1 if name.endswith(COLUMNS) else 0
    at = at.chunk(dim, ranks, rank)
    return Piece(tensor[at.within(Slice.of(tuple(tensor.shape)))].contiguous(), at)
