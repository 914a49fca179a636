"""The index maps of a corpus: which documents and samples are read in which order.

documents  every document once per epoch, shuffled
samples    row i: (position in documents, offset in that document) where sample i starts; the last
           token of a sample is the first token of the next one
shuffle    the order in which samples are read

They are built once, stored in files (see `cache_folder.py`), and verified.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import open_regular, read_object, require_regular

# If less than this fraction of the last epoch is needed, it is shuffled separately. Mixed with the
# other epochs, it would take the place of samples that those should contain.
_SEPARATE_BELOW = 0.8
# What numpy raises for a file that is not one of its arrays, besides those of damaged JSON.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, OverflowError, BadZipFile)
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


class IndexMaps(NamedTuple):
    documents: npt.NDArray[np.int32]
    samples: npt.NDArray[Any]
    shuffle: npt.NDArray[Any]


def split_bounds(split: tuple[int, ...], num_documents: int) -> list[int]:
    """The first document of train, valid and test, and the number of documents."""
    shares = [*split, 0, 0, 0][:3]
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * num_documents))
    surplus = bounds[-1] - num_documents  # from rounding; subtracted everywhere, as in PaddleNLP
    return [0, *(max(0, bound - surplus) for bound in bounds[1:])]


def num_epochs(tokens: int, seq_len: int, num_samples: int) -> int:
    """The smallest number of epochs with enough samples."""
    return max(1, -(-(num_samples * seq_len + 1) // tokens))


def build(
    documents: range, lengths: npt.NDArray[np.int64], seq_len: int, num_samples: int, seed: int
) -> IndexMaps:
    # The order of random calls below decides the order of samples: changing it changes every run.
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
    """Where samples start: sample i starts at token i * seq_len of the shuffled documents."""
    ends = np.cumsum(lengths)
    starts = np.arange(total + 1, dtype=np.int64) * seq_len
    position = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends - lengths)[position]
    rows = np.stack([position, offset], axis=1)
    # Half the memory if possible: a long run has hundreds of millions of rows.
    return rows.astype(np.int32) if rows.max(initial=0) < 1 << 31 else rows


def _shuffled_samples(first: int, total: int, random: np.random.RandomState) -> npt.NDArray[Any]:
    order = np.arange(total, dtype=np.uint32 if total < (1 << 32) - 2 else np.int64)
    random.shuffle(order[:first])
    random.shuffle(order[first:])
    return order


class Cache:
    """The maps as files in one folder. Incomplete, damaged or outdated files are built again."""

    def __init__(self, prefix: Path, facts: dict[str, Any]) -> None:
        sizes = f"{facts['num_samples']}ns_{facts['seq_len']}sl"
        self.stem = prefix.with_name(f"{prefix.name}_gpt_{facts['split']}_indexmap_{sizes}")
        self.folder, self.facts = prefix.parent, facts

    def file(self, array: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}_{array}.npy")

    @property
    def key_file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}_key.json")

    def is_current(self) -> bool:
        """Whether another process has stored these maps, perhaps at this moment."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(read_object(self.key_file)["facts"] == self.facts)
        return False

    def load(self, check: bool) -> IndexMaps | None:
        """Load the maps; None if they are missing or outdated. `check` also verifies checksums."""
        try:
            key = read_object(self.key_file)
            if key["facts"] != self.facts:
                return None
            # Before the checksums: a file of another kind may have any size.
            maps = IndexMaps(*(_mapped(self.file(array)) for array in _ARRAYS))
            if check and any(
                _checksum(self.file(array)) != key["checksums"][array] for array in _ARRAYS
            ):
                return None
            # Again: another job, with another seed, may have replaced some of them meanwhile.
            return maps if self.is_current() else None
        except _DAMAGED:
            return None

    def store(self, maps: IndexMaps) -> None:
        """Write each file atomically. The key file comes last: it means that all are complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_current():  # a key must not describe half-replaced files of other maps
            self.key_file.unlink(missing_ok=True)
        checksums = {}
        for array, values in zip(_ARRAYS, maps):
            with replacing(self.file(array)) as stream:
                np.save(stream, values)
            checksums[array] = _checksum(self.file(array))
        with replacing(self.key_file) as stream:
            stream.write(json.dumps({"facts": self.facts, "checksums": checksums}).encode())


def _mapped(file: Path) -> npt.NDArray[Any]:
    require_regular(file)  # numpy would wait for a FIFO
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("an archive, not an array")
    return array


def _checksum(file: Path) -> int:
    checksum = 0
    with open(open_regular(file), "rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def require_tokens(tokens: int, seq_len: int, what: str) -> None:
    if tokens < seq_len + 1:
        message = f"{what} has {tokens} tokens, but one sample needs {seq_len + 1}"
        raise UserError(
            message, "reduce Data.Train.dataset.max_seq_len, change split, or add documents"
        )
