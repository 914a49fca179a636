"""Reads version 1 of our checkpoints: torch's distributed format, without trusting its metadata.

torch unpickles `.metadata` without restrictions, so a crafted file can run any command. This reader
allows only the few classes that tensors need, and compares the metadata with the expected tensors
before it reads anything.
"""

from __future__ import annotations

import math
import pickle  # nosec B403  # only with an allow-list of classes
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.loading import Shape, Untrusted
from trainer.input_files import open_regular
from trainer.slices import Piece

METADATA = ".metadata"
# What a pickle of torch's metadata refers to. None of these runs code of the user.
_PLAIN_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": [
        "Size",
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    ],
    "pathlib": ["PosixPath", "PurePosixPath"],
}


# Our names and pieces are flat already, so torch has nothing to flatten.
_NO_FLATTENING = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN_CLASSES.get(module, ()):
            raise Untrusted(f"its metadata uses {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """A reader that never unpickles `.metadata` itself, but uses metadata that was checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Shard:
    """A piece with the interface that torch's planners expect: its position in the whole tensor."""

    def __init__(self, piece: Piece) -> None:
        self.tensor, self.at = piece.tensor, piece.at

    def size(self) -> torch.Size:
        return torch.Size(self.at.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.at.offsets), torch.Size(self.at.sizes))]


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Skip torch's search for tensors to allocate: ours exist already."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def load_shards(
    folder: Path,
    pieces: dict[str, Piece],
    shapes: dict[str, Shape],
    files: dict[str, dict[str, Any]],
) -> None:
    """Load the pieces, in whatever layout they were saved.

    The names and shapes in the checkpoint must be exactly those in `shapes`.
    """
    metadata = read_metadata(folder, files)
    check_names(metadata, shapes)
    # A rank may hold an empty piece of a small parameter: there is nothing to load.
    shards = {name: _Shard(piece) for name, piece in pieces.items() if piece.tensor.numel()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(
            shards,
            storage_reader=_Reader(folder, metadata),
            planner=_LoadPlanner(**_NO_FLATTENING),
            no_dist=True,  # every rank reads what it needs, without coordination
        )


def read_metadata(folder: Path, files: dict[str, dict[str, Any]]) -> Metadata:
    """Unpickle the metadata, and check that it refers only to these files."""
    try:
        if METADATA not in files:  # its checksum was not compared
            raise Untrusted(f"its manifest does not list {METADATA}")
        with open(open_regular(folder / METADATA), "rb") as stream:
            metadata = _Unpickler(stream).load()
    except Untrusted:
        raise
    except Exception as error:  # crafted pickles can raise anything
        raise Untrusted(f"cannot read its metadata: {error}") from None
    tables = (
        getattr(metadata, "state_dict_metadata", None),
        getattr(metadata, "storage_data", None),
    )
    if not isinstance(metadata, Metadata) or not all(isinstance(table, dict) for table in tables):
        raise Untrusted("its metadata has an unknown format")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
            raise Untrusted("its metadata has an unknown format")
        known = files.get(place.relative_path)
        inside = (
            known
            and place.offset >= 0
            and place.length > 0
            and place.offset + place.length <= known["bytes"]
        )
        # transform_descriptors would make torch run extensions on the data.
        if not inside or getattr(place, "transform_descriptors", None):
            raise Untrusted(f"its metadata points to {place.relative_path}, outside its own files")
    return metadata


def check_names(metadata: Metadata, shapes: dict[str, Shape]) -> None:
    """Raise ValueError with the first difference."""
    stored = metadata.state_dict_metadata
    for name in [*shapes, *stored]:
        if name not in stored:
            raise ValueError(f"{name} is missing in the checkpoint")
        if name not in shapes:
            raise ValueError(f"it contains {name}, which this model does not have")
        facts = stored[name]
        if not isinstance(facts, TensorStorageMetadata) or tuple(facts.size) != shapes[name]:
            size = tuple(getattr(facts, "size", ()))
            raise ValueError(f"{name} has shape {size} there and {shapes[name]} here")
        # torch loads what it finds and leaves the rest of the tensor unchanged, without an error.
        if sum(chunk.sizes.numel() for chunk in facts.chunks) != math.prod(shapes[name]):
            raise ValueError(f"{name} is stored only in part")
