"""Writes checkpoints of version 1 with torch's own writer, as earlier versions of the trainer did."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.checkpoint import manifest
from trainer.checksums import file_facts
from trainer.slices import Piece, whole


class Shard:
    """A piece, as torch's planner asks for it."""

    def __init__(self, piece: Piece) -> None:
        self.tensor, self.at = piece.tensor, piece.at

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size(self.at.offsets), torch.Size(self.at.sizes))
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.tensor), torch.Size(self.at.whole))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]


class Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor  # type: ignore[no-any-return]


def write_torch_checkpoint(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """A complete checkpoint: torch's files, and a manifest of version 1."""
    folder.mkdir(parents=True)
    shards = {name: Shard(piece) for name, piece in whole(tensors).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save(shards, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    sign(folder, {"version": manifest.TORCH_FORMAT, **facts})


def sign(folder: Path, facts: dict[str, Any]) -> None:
    """Write a manifest with the checksums that the files have now."""
    files = {file.name: file_facts(file) for file in sorted(folder.iterdir()) if file.name != manifest.NAME}
    manifest.write_manifest(folder, facts, files)


def change_manifest(folder: Path, change: Any) -> None:
    """Change something in a manifest, and make its checksum right again, as an attacker would."""
    content = manifest.read_manifest(folder)
    change(content)
    files = content.pop("files")
    manifest.write_manifest(folder, content, files)


def positions_in(file: Path) -> dict[str, Any]:
    """The positions in the header of a tensor file, read without our reader."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["positions"])  # type: ignore[no-any-return]
