"""Tensors in torch's distributed checkpoint format, under global names, and a reader that trusts none of its metadata.

torch unpickles `.metadata` as it is, so a crafted file runs any command. Here only the few classes that a file of
tensors needs are known, and what they say is compared with what is wanted before anything is read.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.checkpoint import METADATA

_PLAIN_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
        "_MEM_FORMAT_ENCODING"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))],
    "pathlib": ["PosixPath", "PurePosixPath"],
}


class Untrusted(Exception):
    """The metadata asks for something that a checkpoint of ours never has."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN_CLASSES.get(module, ()):
            raise Untrusted(f"its metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def save_shards(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Every rank writes its tensors, the first one the metadata; all files are on the disk at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        writer = FileSystemWriter(folder, sync_files=True)
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def load_shards(folder: Path, tensors: dict[str, Tensor], files: dict[str, dict[str, Any]]) -> None:
    """Overwrites the tensors. The names and shapes have to be exactly those of the checkpoint."""
    metadata = read_metadata(folder, files)
    check_names(metadata, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tensors, storage_reader=_Reader(folder, metadata), no_dist=True)


def read_metadata(folder: Path, files: dict[str, dict[str, Any]]) -> Metadata:
    try:
        with open(folder / METADATA, "rb") as stream:
            metadata = _Unpickler(stream).load()
    except Untrusted:
        raise
    except Exception as error:  # crafted pickles raise anything
        raise Untrusted(f"its metadata cannot be read: {error}") from None
    tables = (getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None))
    if not isinstance(metadata, Metadata) or not all(isinstance(table, dict) for table in tables):
        raise Untrusted("its metadata is of another kind")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
            raise Untrusted("its metadata is of another kind")
        known = files.get(place.relative_path)
        inside = known and place.offset >= 0 and place.length > 0 and place.offset + place.length <= known["bytes"]
        if not inside or getattr(place, "transform_descriptors", None):
            raise Untrusted(f"its metadata points to {place.relative_path}, outside of its files")
    return metadata


def check_names(metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError with the first difference."""
    stored = metadata.state_dict_metadata
    for name in [*tensors, *stored]:
        if name not in stored:
            raise ValueError(f"it lacks {name}")
        if name not in tensors:
            raise ValueError(f"it has {name}, which this model lacks")
        facts = stored[name]
        if not isinstance(facts, TensorStorageMetadata) or facts.size != tensors[name].shape:
            size = tuple(getattr(facts, "size", ()))
            raise ValueError(f"{name} has the shape {size} there and {tuple(tensors[name].shape)} here")
        if sum(chunk.sizes.numel() for chunk in facts.chunks) != tensors[name].numel():
            raise ValueError(f"{name} is stored in part only")
