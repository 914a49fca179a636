"""The index maps of a corpus: which documents, which samples, in which order. Built once, kept in files, checked.

documents  every document once per epoch, shuffled
samples    row i: (position in documents, offset in that document) where sample i begins; samples share their end token
shuffle    the order in which samples are taken
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.durable import replacing
from trainer.errors import UserError

_SEPARATE_BELOW = (
    0.8  # a last epoch that supplies less than this share of its samples is shuffled by itself
)
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


class IndexMaps(NamedTuple):
    documents: npt.NDArray[np.int32]
    samples: npt.NDArray[Any]
    shuffle: npt.NDArray[Any]


def split_bounds(split: tuple[int, ...], num_documents: int) -> list[int]:
    """The first documents of train, valid and test, and the end."""
    shares = [*split, 0, 0, 0][:3]
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * num_documents))
    surplus = bounds[-1] - num_documents
    return [0, *(max(0, bound - surplus) for bound in bounds[1:])]


def num_epochs(tokens: int, seq_len: int, num_samples: int) -> int:
    """The smallest number of epochs that supplies enough samples."""
    return max(1, -(-(num_samples * seq_len + 1) // tokens))


def build(
    documents: range, lengths: npt.NDArray[np.int64], seq_len: int, num_samples: int, seed: int
) -> IndexMaps:
    random = np.random.RandomState(seed)
    tokens = int(lengths[documents.start : documents.stop].sum())
    epochs = num_epochs(tokens, seq_len, num_samples)
    per_epoch, before_last = (tokens - 1) // seq_len, ((epochs - 1) * tokens - 1) // seq_len
    separate = epochs > 1 and num_samples - before_last < int(_SEPARATE_BELOW * per_epoch)
    parts = [epochs - 1, 1] if separate else [epochs]
    order = np.concatenate([_shuffled_documents(documents, part, random) for part in parts])
    total = (epochs * tokens - 1) // seq_len
    samples = _sample_starts(lengths[order], seq_len, total)
    shuffle = _shuffled_samples(before_last if separate else total, total, random)
    return IndexMaps(order, samples, shuffle)


def _shuffled_documents(
    documents: range, epochs: int, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    order = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
    random.shuffle(order)
    return order


def _sample_starts(lengths: npt.NDArray[np.int64], seq_len: int, total: int) -> npt.NDArray[Any]:
    """Sample i begins at token i * seq_len of the shuffled documents."""
    ends = np.cumsum(lengths)
    starts = np.arange(total + 1, dtype=np.int64) * seq_len
    position = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends - lengths)[position]
    rows = np.stack([position, offset], axis=1)
    return rows.astype(np.int32) if rows.max(initial=0) < 1 << 31 else rows


def _shuffled_samples(first: int, total: int, random: np.random.RandomState) -> npt.NDArray[Any]:
    order = np.arange(total, dtype=np.uint32 if total < (1 << 32) - 2 else np.int64)
    random.shuffle(order[:first])
    random.shuffle(order[first:])
    return order


class Cache:
    """The maps as files beside the data. What is torn, damaged or made from other data is built again."""

    def __init__(self, prefix: Path, facts: dict[str, Any]) -> None:
        name = f"{prefix.name}_gpt_{facts['split']}_indexmap_{facts['num_samples']}ns_{facts['seq_len']}sl"
        self.stem = prefix.with_name(name)
        self.facts = facts

    def file(self, array: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}_{array}.npy")

    @property
    def key_file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}_key.json")

    def load(self, check: bool) -> IndexMaps | None:
        """None when the files are not there or not as they were written; `check` reads all of them to know."""
        try:
            key = json.loads(self.key_file.read_text(encoding="utf-8"))
            if key["facts"] != self.facts:
                return None
            if check and any(
                _checksum(self.file(array)) != key["checksums"][array] for array in _ARRAYS
            ):
                return None
            return IndexMaps(
                *(np.load(self.file(array), mmap_mode="r", allow_pickle=False) for array in _ARRAYS)
            )
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None

    def store(self, maps: IndexMaps) -> None:
        """Each file by rename, the key last: whoever sees the key sees whole files."""
        self.key_file.unlink(missing_ok=True)
        checksums = {}
        for array, values in zip(_ARRAYS, maps):
            with replacing(self.file(array)) as stream:
                np.save(stream, values)
            checksums[array] = _checksum(self.file(array))
        with replacing(self.key_file) as stream:
            stream.write(json.dumps({"facts": self.facts, "checksums": checksums}).encode())


def _checksum(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def require_tokens(tokens: int, seq_len: int, what: str) -> None:
    if tokens < seq_len + 1:
        message = f"{what} has {tokens} tokens, one sample needs {seq_len + 1}"
        raise UserError(
            message, "shorten Data.Train.dataset.max_seq_len, change split, or add documents"
        )
