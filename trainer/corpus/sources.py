"""Finds the files to tokenize, and opens them as streams of text. Torch-free and numpy-free."""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from trainer.corpus.extras import require
from trainer.errors import WRONG_USAGE, UserError
from trainer.input_files import explain, open_regular

# What a folder is searched for. Other files are used if they are named, or with --format.
_SUFFIXES = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl"}
_COMPRESSED = (".gz", ".zst")
FORMATS = ("text", "jsonl", "parquet")
# Bytes of a .zst file to decompress at once. The library returns all of it, and every four bytes
# can contain 128 KiB: these are at most 16 MiB.
_ZSTD_PART = 512


class Source(NamedTuple):
    path: str
    format: str  # one of FORMATS
    size: int  # bytes on disk
    changed: int  # modification time, in nanoseconds


class Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def find_sources(words: Iterable[str], format: str | None = None) -> list[Source]:
    """The files that paths, folders and glob patterns name, each once, in a fixed order."""
    paths = dict.fromkeys(path for word in words for path in _expanded(word, format))
    if not paths:
        raise _nothing_found()
    return [_source(path, format) for path in paths]


def require_inputs(words: Iterable[str], format: str | None = None) -> None:
    """Raise UserError if a path does not exist, or none has an input. Opens no file."""
    found = [next(_expanded(word, format), None) for word in words]
    if not any(found):
        raise _nothing_found()


def _nothing_found() -> UserError:
    known = ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
    compressed = " or ".join(_COMPRESSED)
    hint = (
        f"folders are searched for {known} (with or without {compressed}) and *.parquet; "
        "--format text takes all files"
    )
    return UserError("no input files found", hint, WRONG_USAGE)


def _expanded(word: str, format: str | None) -> Iterator[str]:
    if os.path.isdir(word):
        yield from _files_below(word, format)
    elif os.path.exists(word):
        yield word
    elif found := sorted(glob.glob(word, recursive=True)):
        for path in found:
            yield from _files_below(path, format) if os.path.isdir(path) else [path]
    else:
        hint = "write a file, a folder, or a pattern such as 'data/*.jsonl'"
        raise UserError(f"no input at {word}", hint, WRONG_USAGE)


def _files_below(folder: str, format: str | None) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        # In place, which `os.walk` follows: the order must not depend on the file system.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (format or _format_of(name, is_named=False)):
                yield os.path.join(parent, name)


def _format_of(name: str, is_named: bool) -> str | None:
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if suffix == ".parquet":
        return "parquet"
    if is_named and suffix == ".json":  # as Megatron's loose JSON; in a folder it can be anything
        return "jsonl"
    return _SUFFIXES.get(suffix, "text" if is_named else None)


def _source(path: str, format: str | None) -> Source:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise UserError(explain(path, error), "check the path", WRONG_USAGE) from None
    status = os.fstat(descriptor)
    os.close(descriptor)
    found = format or _format_of(os.path.basename(path), is_named=True)
    assert found is not None
    return Source(path, found, status.st_size, status.st_mtime_ns)


class OpenSource:
    """A source as a stream of bytes, decompressed, from any position."""

    def __init__(self, source: Source, offset: int = 0) -> None:
        self.source = source
        self.raw: BinaryIO = open(open_regular(source.path), "rb")  # noqa: SIM115 (see `close`)
        self._stream: Stream = self._decompressed()
        self._skip(offset)

    def _decompressed(self) -> Stream:
        if self.source.path.endswith(".gz"):
            return gzip.GzipFile(fileobj=self.raw)
        if self.source.path.endswith(".zst"):
            return ZstdStream(self.raw)
        return self.raw

    def _skip(self, offset: int) -> None:
        if self._stream is self.raw:
            self.raw.seek(offset)
            return
        while offset > 0 and (block := self.read(min(offset, 1 << 20))):
            offset -= len(block)

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            hint = "the file is damaged or incomplete: get it again, or leave it out"
            raise UserError(f"cannot read {self.source.path}: {error}", hint) from None

    @property
    def done(self) -> int:
        """The bytes of the file that were read, for the progress."""
        return self.raw.tell()

    def close(self) -> None:
        self.raw.close()


class ZstdStream:
    """Decompresses zstd frames. Unlike the library's own reader, it notices a truncated file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._ready = raw, io.BytesIO()
        self._library = require("zstandard", "reading .zst files")
        self._frame: Any = None

    def read(self, size: int) -> bytes:
        while not (data := self._ready.read(size)):
            if not self._fill():
                return b""
        return data

    def _fill(self) -> bool:
        rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        chunk = rest or self._raw.read(_ZSTD_PART)
        if not chunk:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the compressed data ends too early")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = io.BytesIO(self._frame.decompress(chunk))
        except self._library.ZstdError as error:
            raise EOFError(str(error)) from None
        return True
