"""Cuts input files into blocks, the units of work of `prepare`. Torch-free and numpy-free.

Where blocks begin depends only on the files, so the output is the same with any number of workers,
and after any interruption. A document that is larger than a block is cut into pieces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trainer.corpus.extras import require
from trainer.corpus.parquet_pages import largest_page
from trainer.corpus.sources import OpenSource, Source
from trainer.errors import UserError
from trainer.input_files import open_regular, require_regular

BLOCK = 1 << 19  # bytes to read at once: small enough that workers finish together
LONGEST_TEXT = 4 << 20  # bytes of a text document that is not cut into pieces
LONGEST_LINE = 64 << 20  # bytes of a JSON line: parsing it takes several times as much memory
PARQUET_ROWS = 128
# Bytes that a batch of rows may have, and that a page may have: it is decompressed as a whole.
LARGEST_BATCH, LARGEST_PAGE = 1 << 28, 1 << 29
# What separates documents; `file`: nothing. Blank lines may have spaces and tabs.
SEPARATORS = {
    "jsonl": re.compile(rb"\n"),
    "line": re.compile(rb"\n"),
    "paragraph": re.compile(rb"\n(?:[ \t\r]*\n)+"),
    "file": None,
}
FIRST_LINES = re.compile(rb"\A(?:[ \t\r]*\n)+")  # blank lines before a paragraph
LINE_ENDS = b"\r\n"  # which end a paragraph, and do not belong to it
PIECE, TOO_LONG, PARQUET, LONG_ROW = "piece", "too long", "parquet", "long row"
_SPACE = ord(" ")
_NEAR = 1 << 16  # bytes before the end of a piece in which to look for a space


class Position(NamedTuple):
    """Where the next block begins."""

    source: int = 0
    offset: int = 0  # decompressed bytes; rows of a parquet file
    inside: bool = False  # in the middle of a document
    line: int = 0  # lines of this source before it


class Block(NamedTuple):
    # jsonl, line, paragraph, parquet: whole documents. piece, too long: of one. long row: one
    kind: str
    data: bytes
    begin: Position
    end: Position
    done: int  # bytes on disk up to here, of all sources
    starts: bool = True  # of a piece: it is the first of its document
    ends: bool = True
    digest: bytes = b""  # of the last piece of a document, if copies are removed


class Cutting(NamedTuple):
    """What decides how files are cut."""

    documents: str = "file"  # of a text file: file, line or paragraph
    field: str = "text"  # of JSON and parquet: where the text is
    hashes: bool = False  # whether copies of documents are removed


def blocks_of(sources: Sequence[Source], cutting: Cutting, start: Position) -> Iterator[Block]:
    """All blocks from a position on."""
    before = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        position = start if number == start.source else Position(number)
        cut = _parquet_blocks if sources[number].format == PARQUET else _text_blocks
        for block in cut(sources[number], cutting, position):
            yield block._replace(done=before + block.done)
        before += sources[number].size


def _text_blocks(source: Source, cutting: Cutting, start: Position) -> Iterator[Block]:
    kind = "jsonl" if source.format == "jsonl" else cutting.documents
    try:
        opened = OpenSource(source, start.offset)
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror}", "check the path") from None
    try:
        yield from _Cutter(opened, kind, start, cutting.hashes).blocks()
    finally:
        opened.close()


class _Cutter:
    """Cuts one stream. `buffer` has what was read, but does not belong to a block yet."""

    def __init__(self, opened: OpenSource, kind: str, start: Position, hashes: bool) -> None:
        self.opened, self.kind, self.position = opened, kind, start
        self.separator = SEPARATORS[kind]
        self.buffer, self.at_end = bytearray(), False
        self.is_cut = False  # whether a block of this stream was cut
        self.hash = hashlib.blake2b(digest_size=16) if hashes else None
        limits = {"jsonl": LONGEST_LINE, "file": BLOCK}
        self.longest = limits.get(kind, LONGEST_TEXT)

    def blocks(self) -> Iterator[Block]:
        while block := self._next():
            yield block

    def _next(self) -> Block | None:
        """The next block. It depends on the position alone, so that a run can continue there."""
        self._fill(BLOCK)
        if self.position.inside:
            return self._piece()
        while not (block := self._whole()) and not self.at_end:
            self._fill(len(self.buffer) + BLOCK)
        return block

    def _skip_first_lines(self) -> None:
        """Skip blank lines before a paragraph: its pieces must be the same text as all of it."""
        if self.kind == "paragraph" and (found := FIRST_LINES.match(self.buffer)):
            begin, lines = self.position, found[0].count(b"\n")
            self.position = begin._replace(
                offset=begin.offset + found.end(), line=begin.line + lines
            )
            del self.buffer[: found.end()]

    def _fill(self, size: int) -> None:
        """Read until the buffer has this many bytes, or the stream ends."""
        while len(self.buffer) < size and not self.at_end:
            chunk = self.opened.read(size - len(self.buffer))
            self.buffer += chunk
            self.at_end = not chunk

    def _whole(self) -> Block | None:
        """A block of whole documents, or the first piece of one that is too large."""
        self._skip_first_lines()
        if end := self._last():
            return self._cut(self.kind, end)
        if self.at_end:
            kind = self.kind if self.separator else PIECE
            # An empty file is a document, too, if files are: it is counted as empty.
            is_empty_file = kind == PIECE and not self.position.offset and not self.is_cut
            return self._cut(kind, len(self.buffer)) if self.buffer or is_empty_file else None
        if len(self.buffer) > self.longest:
            return self._cut(self._part, safe_end(self.buffer), ends=False)
        return None

    def _piece(self) -> Block:
        """The next piece of a document."""
        found = self.separator.search(self.buffer) if self.separator else None
        if not found and not self.at_end:
            return self._cut(self._part, safe_end(self.buffer), starts=False, ends=False)
        end, after = found.span() if found else (len(self.buffer), len(self.buffer))
        if self.kind == "paragraph":
            end = len(self.buffer[:end].rstrip(LINE_ENDS))
        return self._cut(self._part, end, after - end, starts=False)

    @property
    def _part(self) -> str:
        return TOO_LONG if self.kind == "jsonl" else PIECE

    def _last(self) -> int:
        """Where the last separator in the buffer ends; 0 if there is none."""
        if self.separator is None:
            return 0
        if self.kind != "paragraph":
            return self.buffer.rfind(b"\n") + 1
        return max((found.end() for found in self.separator.finditer(self.buffer)), default=0)

    def _cut(
        self, kind: str, end: int, separator: int = 0, starts: bool = True, ends: bool = True
    ) -> Block:
        data, begin, self.is_cut = bytes(self.buffer[:end]), self.position, True
        lines = self.buffer.count(b"\n", 0, end + separator)
        del self.buffer[: end + separator]
        self.position = Position(
            begin.source, begin.offset + end + separator, not ends, begin.line + lines
        )
        digest = self._digest(data, starts, ends) if kind == PIECE else b""
        # A line that is too long is only counted: nobody needs its text.
        data = b"" if kind == TOO_LONG else data
        return Block(kind, data, begin, self.position, self.opened.done, starts, ends, digest)

    def _digest(self, data: bytes, starts: bool, ends: bool) -> bytes:
        if self.hash is None:
            return b""
        if starts:
            self.hash = hashlib.blake2b(digest_size=16)
        self.hash.update(data)
        return self.hash.digest() if ends else b""


def safe_end(data: bytes | bytearray) -> int:
    """Where to cut text in two so that most tokenizers give the same tokens: before a space.

    Otherwise anywhere between two characters. Never within white space that has a line break: it
    may be the beginning of a blank line, which separates documents.
    """
    nearest, place = max(1, len(data) - _NEAR), len(data)
    while (place := data.rfind(b" ", nearest, place)) > 0:
        while place > 1 and data[place - 1] == _SPACE:  # before the first of several spaces
            place -= 1
        if place > 1 and data[place - 1] not in b"\t\r\n":
            return place
    # A character has up to four bytes, the last of which may not be here yet.
    place = max(1, len(data) - 4)
    if text := len(data[:place].rstrip(b" \t\r\n")):  # white space that fills a buffer is cut
        place = text
    return _between_characters(data, place)


def _between_characters(data: bytes | bytearray, place: int) -> int:
    for begin in range(place, max(0, place - 4), -1):
        if data[begin] & 0xC0 != 0x80:  # the first byte of a character
            return begin
    return place  # not UTF-8: a character has at most three more bytes


def _parquet_blocks(source: Source, cutting: Cutting, start: Position) -> Iterator[Block]:
    file, row = _opened_parquet(source, cutting.field), 0
    groups = file.metadata.num_row_groups
    for group in range(groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= start.offset:
            row += rows
            continue
        for batch in _batches(source, file, group, cutting.field):
            for texts, is_long in _parts(batch):
                begin, row = row, row + len(texts)
                if row <= start.offset:
                    continue
                done = source.size * row // max(1, file.metadata.num_rows)
                kind, data = (LONG_ROW, b"") if is_long else (PARQUET, _serialized(texts))
                places = [Position(start.source, each, line=each) for each in (begin, row)]
                yield Block(kind, data, places[0], places[1], done)


def _parts(batch: Any) -> Iterator[tuple[Any, bool]]:
    """Cut a batch by bytes, and say which rows are too long: a batch is limited by rows alone."""
    arrow, compute = (require(name, "reading parquet") for name in ("pyarrow", "pyarrow.compute"))
    # As bytes, so that invalid UTF-8 is found where that of other formats is.
    column, begin, size = batch.column(0).cast(arrow.large_binary()), 0, 0
    for row, length in enumerate(compute.binary_length(column).to_pylist()):
        length = length or 0
        is_long = length > LONGEST_LINE
        if row > begin and (is_long or size + length > BLOCK):
            yield column.slice(begin, row - begin), False
            begin, size = row, 0
        size += length
        if is_long:
            yield column.slice(row, 1), True
            begin, size = row + 1, 0
    if begin < len(column):
        yield column.slice(begin), False


def _opened_parquet(source: Source, field: str) -> Any:
    parquet = require("pyarrow.parquet", f"reading {source.path}")
    try:
        require_regular(source.path)
        # With a buffer, a column is read in parts: without, all of a row group at once.
        file = parquet.ParquetFile(source.path, buffer_size=1 << 20)
    except Exception as error:  # a damaged file makes pyarrow raise anything
        hint = "the file is damaged or not parquet: get it again, or leave it out"
        raise UserError(f"cannot read {source.path}: {error}", hint) from None
    names = file.schema_arrow.names
    if field not in names:
        hint = f"it has {', '.join(names[:10])}: choose one with --field"
        raise UserError(f"{source.path} has no column {field}", hint)
    if (kind := str(file.schema_arrow.field(field).type)) not in _TEXT_TYPES:
        hint = "choose a column of texts with --field"
        raise UserError(f"{source.path}: column {field} has type {kind}", hint)
    return file


_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary")


def _batches(source: Source, file: Any, group: int, field: str) -> Iterator[Any]:
    hint = "the file is damaged: get it again, or leave it out"
    try:
        rows = _rows_at_once(source, file.metadata.row_group(group), field)
        yield from file.iter_batches(rows, row_groups=[group], columns=[field])
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {source.path}: {error}", hint) from None


def _rows_at_once(source: Source, group: Any, field: str) -> int:
    """How many rows fit into memory, even if each is as large as a page can make it."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    chunk = next(each for each in chunks if each.path_in_schema == field)
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    begin = min((offset for offset in offsets if offset), default=0)  # of no rows: none
    with open(open_regular(source.path), "rb") as stream:
        size = largest_page(stream, begin, chunk.total_compressed_size)
    if size > LARGEST_PAGE:
        message = f"{source.path}: a page of column {field} has {size:,} bytes"
        hint = f"at most {LARGEST_PAGE:,} are supported: write it with a smaller data_page_size"
        raise UserError(message, hint)
    return max(1, min(PARQUET_ROWS, LARGEST_BATCH // max(1, size)))


def _serialized(column: Any) -> bytes:
    arrow = require("pyarrow", "reading parquet")
    sink = arrow.BufferOutputStream()
    plain = arrow.record_batch([column], names=["text"])
    with arrow.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_batch(plain)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def texts_of_parquet(data: bytes) -> list[bytes | None]:
    arrow = require("pyarrow", "reading parquet")
    with arrow.ipc.open_stream(data) as reader:
        values: list[bytes | None] = reader.read_all().column(0).to_pylist()
    return values
