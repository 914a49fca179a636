"""Joins shards into token files, in one of three formats. Memory does not grow with the data."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainer.checksums import FileFacts, file_facts
from trainer.corpus.indexed import LONGEST, write_index
from trainer.corpus.metadata import ENDING as METADATA
from trainer.corpus.shards import Shard, checksum
from trainer.durable import replacing
from trainer.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMATS = ("npy", "npz", "megatron")
ENDINGS = {
    "npy": ("_ids.npy", "_idx.npz"),
    "npz": ("_ids.npz",),
    "megatron": (".bin", ".idx"),
}
_CHUNK = 1 << 22  # bytes per copy
DTYPES = {"H": "uint16", "i": "int32"}


class Joined(NamedTuple):
    """Shards as one sequence of tokens."""

    folder: Path
    shards: Sequence[Shard]
    dtype: str
    advance: Callable[[int], None] = lambda _: None  # called with bytes that were handled

    @property
    def tokens(self) -> int:
        return sum(shard.counts.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.counts.documents for shard in self.shards)

    def ids(self) -> Iterator[bytes]:
        return self._chunks("ids")

    def lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        import numpy as np

        for chunk in self._chunks("lens"):
            yield np.frombuffer(chunk, np.int64)

    def _chunks(self, part: str) -> Iterator[bytes]:
        for shard in self.shards:
            with open(shard.file(self.folder, part), "rb") as stream:
                while data := stream.read(_CHUNK):
                    yield data
                    self.advance(len(data))

    def check(self) -> None:
        """Raise UserError if a shard is damaged: nobody would notice the wrong output."""
        for shard in self.shards:
            for part, (_, expected) in shard.files.items():
                file = shard.file(self.folder, part)
                if checksum(file, self.advance) != expected:
                    hint = f"check the disk, delete {file} and run the same command again"
                    raise UserError(f"{file} is damaged: wrong checksum", hint)


class _Writer(Protocol):
    def write(self, data: bytes, /) -> Any: ...


def write_output(kind: str, prefix: Path, joined: Joined) -> dict[str, FileFacts]:
    """Write the token files of a prefix. Returns their sizes and checksums, by name."""
    files = [prefix.with_name(prefix.name + ending) for ending in ENDINGS[kind]]
    write = {"npy": _write_npy, "npz": _write_npz, "megatron": _write_megatron}[kind]
    write(files, joined)
    return {file.name: file_facts(file, advance=joined.advance) for file in files}


def work_of(shards: Sequence[Shard]) -> int:
    """The bytes that joining handles, about: of each shard checked, copied and read back."""
    return sum(3 * size for shard in shards for size, _ in shard.files.values())


def token_files_at(prefix: Path, is_merged: bool) -> list[Path]:
    """The files at a prefix that token files would replace, or that would be read with them."""
    return _files_at(prefix, is_merged, (), "")


def remove_token_files(
    prefix: Path, known: Iterable[str], is_merged: bool, new: Container[str]
) -> None:
    """Delete the token files at a prefix, and those that its metadata names, except new ones."""
    endings = tuple(ending for each in ENDINGS.values() for ending in each)
    named = (name for name in known if Path(name).name == name and name.endswith(endings))
    for file in (*token_files_at(prefix, is_merged), *map(prefix.with_name, named)):
        if file.name not in new:
            file.unlink(missing_ok=True)


def remove_parts(prefix: Path, is_merged: bool) -> None:
    """Delete the temporary files that a killed process left, see `replacing`."""
    for file in _files_at(prefix, is_merged, (METADATA,), r"\.part[0-9]+"):
        file.unlink(missing_ok=True)


def _files_at(prefix: Path, is_merged: bool, others: Iterable[str], suffix: str) -> list[Path]:
    numbers = "" if is_merged else "(-[0-9]{5,})?"
    known = [*others, *(ending for each in ENDINGS.values() for ending in each)]
    endings = "|".join(map(re.escape, known))
    name = re.compile(f"{re.escape(prefix.name)}{numbers}({endings}){suffix}")
    names = os.listdir(prefix.parent) if prefix.parent.is_dir() else ()
    return [prefix.with_name(each) for each in sorted(names) if name.fullmatch(each)]


def _write_npy(files: Sequence[Path], joined: Joined) -> None:
    with replacing(files[0]) as stream:
        _write_array(stream, joined.dtype, joined.tokens, joined.ids())
    with replacing(files[1]) as stream, zipfile.ZipFile(stream, "w") as archive:
        _write_lengths(archive, joined)
        # Each document has one sentence.
        _write_member(archive, "docs", "int64", joined.documents + 1, _counting(joined.documents))


def _write_npz(files: Sequence[Path], joined: Joined) -> None:
    with replacing(files[0]) as stream, zipfile.ZipFile(stream, "w") as archive:
        _write_member(archive, "ids", joined.dtype, joined.tokens, joined.ids())
        _write_lengths(archive, joined)


def _write_megatron(files: Sequence[Path], joined: Joined) -> None:
    if (longest := max(shard.counts.longest for shard in joined.shards)) > LONGEST:
        message = f"a document has {longest:,} tokens, but a Megatron index can have {LONGEST:,}"
        raise UserError(message, "split it (--documents paragraph), or use --output-format npy")
    with replacing(files[0]) as stream:
        for data in joined.ids():
            stream.write(data)
    with replacing(files[1]) as stream:
        write_index(stream, joined.dtype, joined.documents, joined.lengths)


def _write_lengths(archive: zipfile.ZipFile, joined: Joined) -> None:
    data = (chunk.tobytes() for chunk in joined.lengths())
    _write_member(archive, "lens", "int64", joined.documents, data)


def _write_member(
    archive: zipfile.ZipFile, name: str, dtype: str, count: int, data: Iterable[bytes]
) -> None:
    # Not compressed, so that readers can map it into memory; zip64, because it may be large.
    info = zipfile.ZipInfo(f"{name}.npy")
    with archive.open(info, "w", force_zip64=True) as stream:
        _write_array(stream, dtype, count, data)


def _write_array(stream: _Writer, dtype: str, count: int, data: Iterable[bytes]) -> None:
    import numpy as np

    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, header)
    for chunk in data:
        stream.write(chunk)


def _counting(last: int) -> Iterator[bytes]:
    import numpy as np

    for first in range(0, last + 1, _CHUNK):
        yield np.arange(first, min(last + 1, first + _CHUNK), dtype=np.int64).tobytes()
