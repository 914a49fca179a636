"""The weights of a checkpoint of any layout, read one by one, without the optimizer's state.

The parts of a tensor may be in files of several ranks. Every block that is read is compared with
its checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.loading import Index, Untrusted, load_indexed, read_index
from trainer.checkpoint.manifest import VERSION
from trainer.checksums import Damaged
from trainer.config.sections import Model
from trainer.errors import UserError
from trainer.model import GPT
from trainer.slices import Piece, Slice, shapes
from trainer.weights.safetensors_format import Shape

EMBEDDING = "word_embeddings.weight"
PREFIX = "model."  # of the weights in a checkpoint


def weight_shapes(model: Model) -> dict[str, Shape]:
    """The shape of every parameter, in the order of the model."""
    with torch.device("meta"):  # no memory
        return shapes(dict(GPT(model).named_parameters()))


class CheckpointWeights:
    def __init__(self, folder: Path, facts: dict[str, Any], model: Model) -> None:
        self.folder, self.facts, self.model = folder, facts, model
        # Before a model of that size is made: a crafted manifest can claim a million layers.
        if model.num_layers > len(facts.get("tensors") or ()):
            message = f"{folder} has fewer tensors than layers"
            raise UserError(message, "use only checkpoints that you or your team wrote")
        self.shapes = weight_shapes(model)
        if facts["version"] != VERSION:
            hint = "resume its run for one step: it then saves a checkpoint of the current format"
            raise UserError(f"{folder} has the old format {facts['version']}", hint)
        self._index = self._read_index()

    def _read_index(self) -> Index:
        tensors = self.facts.get("tensors")
        weights = None
        if isinstance(tensors, dict):  # the state of the optimizer may be missing
            weights = {name: facts for name, facts in tensors.items() if name.startswith(PREFIX)}
        expected = {f"{PREFIX}{name}": shape for name, shape in self.shapes.items()}
        with _explained(self.folder):
            return read_index({**self.facts, "tensors": weights}, expected)

    def read(self, name: str) -> Tensor:
        """A parameter in float32, the embedding without the rows that only pad the vocabulary."""
        at = Slice.of(self.shapes[name])
        if name == EMBEDDING:
            assert self.model.vocab_size is not None
            at = at.rows(0, self.model.vocab_size)
        tensor = torch.empty(at.sizes)
        with _explained(self.folder):
            pieces = {f"{PREFIX}{name}": Piece(tensor, at)}
            load_indexed(self.folder, self.facts, self._index, pieces)
        return tensor


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except Damaged as damage:
        raise UserError(f"cannot use {folder}: {damage}", "use another checkpoint") from None
    except Untrusted as error:
        hint = "use only checkpoints that you or your team wrote"
        raise UserError(f"cannot load {folder}: {error}", hint) from None
    except ValueError as error:
        message = f"{folder} does not contain the model of its manifest: {error}"
        raise UserError(message, "use another checkpoint") from None
