"""Token files: `*_ids.npz` (ids, lens), `*_ids.npy` with `*_idx.npz` (lens, docs), or Megatron's
`*.bin` with `*.idx` (see `indexed.py`).

All files of a folder form one corpus. `ids` contains the tokens of all documents in a row. `lens`
has the number of tokens per document, or per sentence if `docs` exists, which has the number of
sentences before each document. Files are mapped into memory, not read. Torch-free.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.corpus.indexed import read_index
from trainer.corpus.metadata import metadata_at, stem_of
from trainer.corpus.npz import array_of
from trainer.errors import UserError
from trainer.input_files import Unsuitable, require_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HINT = "set input_dir of the dataset to a token file, or to a folder of them"
_FORMATS = (
    "*_ids.npz (arrays ids, lens), *_ids.npy with *_idx.npz (arrays lens, docs), "
    "or *.bin with *.idx"
)
_INDEXES = ("_ids.npz", "_idx.npz", ".idx")  # each prefix has at least one of them
_CHUNK = 1 << 24  # tokens per read when a file is checked, to limit memory


class TokenFile(NamedTuple):
    prefix: Path  # without _ids.npz or _ids.npy
    ids: npt.NDArray[Any]  # one dimension, memory-mapped
    lengths: npt.NDArray[np.int64]  # tokens per document
    changed: float = 0.0  # modification time of the file

    def largest_id(self) -> int:
        """Read the whole file. Returns the first negative id, if any, since it is invalid too."""
        largest = 0
        for first in range(0, len(self.ids), _CHUNK):
            part = self.ids[first : first + _CHUNK]
            if part.min() < 0:
                return int(part.min())
            largest = max(largest, int(part.max()))
        return largest


class Corpus:
    """The documents of several files, numbered consecutively."""

    def __init__(self, files: list[TokenFile]) -> None:
        import numpy as np

        self.files = files
        self.lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths for file in files)])
        self.file_of = np.repeat(np.arange(len(files)), [len(file.lengths) for file in files])
        self.digest = zlib.crc32(self.lengths.tobytes())  # index maps depend on the lengths
        starts = [np.cumsum(file.lengths) - file.lengths for file in files]
        self.start_of = np.concatenate([np.empty(0, np.int64), *starts])

    def read(self, document: int, offset: int, count: int) -> npt.NDArray[Any]:
        """Up to `count` tokens of a document."""
        start = int(self.start_of[document]) + offset
        stop = min(start + count, int(self.start_of[document] + self.lengths[document]))
        part: npt.NDArray[Any] = self.files[self.file_of[document]].ids[start:stop]
        return part


def open_corpus(input_dir: str) -> Corpus:
    files = [_open(prefix) for prefix in prefixes(Path(input_dir))]
    return Corpus(files)


def prefixes(path: Path) -> list[Path]:
    """The prefixes of all token files in a folder, or of the one file or prefix given."""
    folder, wanted = (path, None) if os.path.isdir(path) else (path.parent, stem_of(path.name))
    try:
        stems = {stem_of(name) for name in os.listdir(folder) if name.endswith(_INDEXES)}
    except OSError as error:
        raise UserError(f"no data at {path}: {error.strerror}", HINT) from None
    if wanted is None:
        if not stems:
            raise UserError(f"{path} contains no token files", f"expected: {_FORMATS}")
        return [folder / stem for stem in sorted(stems)]
    # A prefix of data that was not merged has several files.
    parts = {stem_of(name) for each in metadata_at(folder / wanted) for name in each.files}
    found = {wanted} if wanted in stems else parts
    if not found:
        raise UserError(f"no data at {path}", HINT)
    return [folder / stem for stem in sorted(found)]


def _open(prefix: Path) -> TokenFile:
    pair, single, indexed = (
        prefix.with_name(prefix.name + ending) for ending in ("_idx.npz", "_ids.npz", ".idx")
    )
    try:
        if pair.exists():  # preferred to a single npz, as in FleetX
            file, ids, lengths = _open_pair(prefix, pair)
        elif single.exists() or not indexed.exists():
            require_regular(single)
            file, ids = single, array_of(single, "ids", _FORMATS)
            lengths = _lengths(single, "lens", ids.size)
        else:
            file, ids, lengths = _open_indexed(prefix, indexed)
        changed = file.stat().st_mtime
    except UserError:
        raise
    except Unsuitable as error:
        raise UserError(f"{error.filename} {error.strerror}", HINT) from None
    except Exception as error:  # a damaged file makes numpy and zipfile raise anything
        raise UserError(
            f"{prefix}: cannot read token files: {error}", f"expected: {_FORMATS}"
        ) from None
    return _checked(TokenFile(prefix, ids, lengths, changed))


def _open_pair(prefix: Path, pair: Path) -> tuple[Path, npt.NDArray[Any], npt.NDArray[np.int64]]:
    import numpy as np

    file = prefix.with_name(prefix.name + "_ids.npy")
    require_regular(file)  # numpy would wait for a FIFO
    require_regular(pair)
    ids = np.load(file, mmap_mode="r", allow_pickle=False)
    return file, ids, _document_lengths(pair, ids.size)


def _open_indexed(
    prefix: Path, index: Path
) -> tuple[Path, npt.NDArray[Any], npt.NDArray[np.int64]]:
    import numpy as np

    dtype, lengths = read_index(index)
    file = prefix.with_name(prefix.name + ".bin")
    require_regular(file)
    size, expected = file.stat().st_size, int(lengths.sum()) * dtype.itemsize
    if size != expected:
        message = f"{file} has {size} bytes, but {index.name} describes {expected}"
        raise UserError(message, "a file is truncated, or they do not belong together")
    # An empty file cannot be mapped.
    ids = np.memmap(file, dtype, "r") if size else np.empty(0, dtype)
    return file, ids, lengths


def _checked(file: TokenFile) -> TokenFile:
    ids, lengths = file.ids, file.lengths
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        message = f"{file.prefix}: ids is a {ids.ndim}-dimensional array of {ids.dtype}"
        raise UserError(message, "ids must be a one-dimensional array of integers")
    if lengths.sum() != len(ids):
        message = f"{file.prefix}: the sum of lens is {int(lengths.sum())}, but ids has {len(ids)}"
        hint = "ids and lens do not belong together, or a file is truncated: create them again"
        raise UserError(message, hint)
    return file


def _lengths(file: Path, name: str, most: int) -> npt.NDArray[np.int64]:
    """Read a one-dimensional array of integers from 0 to `most`."""
    import numpy as np

    values = array_of(file, name, _FORMATS)
    if values.ndim != 1 or values.dtype.kind not in "ui":
        message = f"{file}: {name} is a {values.ndim}-dimensional array of {values.dtype}"
        raise UserError(message, f"{name} must be a one-dimensional array of integers")
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) <= most:
        message = (
            f"{file}: {name} has values from {int(values.min())} to {int(values.max())}, "
            f"expected 0 to {most}"
        )
        raise UserError(message, f"create {name} again")
    return values.astype(np.int64)


def _document_lengths(index: Path, num_ids: int) -> npt.NDArray[np.int64]:
    import numpy as np

    lens = _lengths(index, "lens", num_ids)
    docs = _lengths(index, "docs", len(lens))
    if not len(docs) or docs[0] != 0 or docs[-1] != len(lens) or (np.diff(docs) < 0).any():
        hint = f"docs must count sentences from 0 to {len(lens)}, in ascending order"
        raise UserError(f"{index}: docs does not match the {len(lens)} sentences of lens", hint)
    # From tokens per sentence to tokens per document.
    total = np.concatenate([[0], np.cumsum(lens)])
    return np.diff(total[docs])
