"""Turns one block of input into token ids. Runs in every worker. Torch-free and numpy-free."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.corpus.blocks import (
    FIRST_LINES,
    LINE_ENDS,
    LONG_ROW,
    PARQUET,
    PIECE,
    SEPARATORS,
    TOO_LONG,
    Block,
    texts_of_parquet,
)
from trainer.corpus.sources import Source
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import UserError

# Characters per call of a tokenizer: it needs 100 to 200 bytes of memory for each.
PART, BATCH = 1 << 18, 1 << 21
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd".encode()


class Rules(NamedTuple):
    """What to do with documents, as the user chose."""

    field: str = "text"
    eos: bool = True  # end each document with the end token, if the tokenizer has one
    refuses_bytes: bool = False  # invalid UTF-8 is an error; otherwise it is replaced
    skips_lines: bool = False  # invalid lines are left out; otherwise they are errors
    hashes: bool = False


class Refused(NamedTuple):
    """A problem that ends the command; `line` counts from the block's first line, from 0."""

    line: int
    message: str
    hint: str


class Encoded(NamedTuple):
    ids: bytes
    lengths: list[int]  # tokens per document; one entry for a piece
    text_bytes: int = 0
    empty: int = 0
    replaced: int = 0  # invalid sequences of bytes
    skipped: int = 0  # invalid lines
    digests: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()  # bytes of the text of each document, if there are digests
    refused: Refused | None = None


class _Stop(Exception):
    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class Encoder:
    def __init__(self, tokenizer: Tokenizer, rules: Rules) -> None:
        self.tokenizer, self.rules = tokenizer, rules
        self.typecode = typecode_of(tokenizer.vocab_size)
        self.adds_space = _adds_space(tokenizer)

    def encode(self, block: Block) -> Encoded:
        reading = _Reading(self.rules)
        try:
            texts = [*reading.texts(block)]
        except _Stop as stop:
            return Encoded(b"", [], refused=stop.refused)
        ids = array(self.typecode)
        lengths = self._fill(ids, texts, block)
        return Encoded(
            ids.tobytes(),
            lengths,
            reading.text_bytes,
            reading.empty,
            reading.replaced,
            reading.skipped,
            tuple(reading.digests),
            tuple(reading.sizes),
        )

    def _fill(self, ids: array[int], texts: Sequence[str], block: Block) -> list[int]:
        """Append the tokens of all texts; returns the number of tokens of each."""
        ends = self.rules.eos and self.tokenizer.eos_id is not None and block.ends
        lengths = []
        for encoded in self._encoded(texts, is_rest=not block.starts):
            begin = len(ids)
            for part in encoded:
                ids.extend(array(self.typecode, part))
            if ends:
                assert self.tokenizer.eos_id is not None
                ids.append(self.tokenizer.eos_id)
            lengths.append(len(ids) - begin)
        return lengths

    def _encoded(self, texts: Sequence[str], is_rest: bool) -> Iterator[list[list[int]]]:
        """The tokens of each text, in parts: long texts are cut, short ones encoded together."""
        batch: list[list[str]] = []
        size = 0
        for text in texts:
            batch.append(self._parts(text, is_rest))
            size += len(text)
            if size > BATCH:
                yield from self._encoded_batch(batch)
                batch, size = [], 0
        yield from self._encoded_batch(batch)

    def _encoded_batch(self, batch: Sequence[Sequence[str]]) -> Iterator[list[list[int]]]:
        encoded = iter(self.tokenizer.encode_batch([part for parts in batch for part in parts]))
        for parts in batch:
            yield [next(encoded) for _ in parts]

    def _parts(self, text: str, is_rest: bool) -> list[str]:
        parts = [*_cut(text)] if len(text) > PART else [text]
        # Such a tokenizer would see the space that it adds, and the one before which text was cut.
        if self.adds_space:
            first = parts[0].removeprefix(" ") if is_rest else parts[0]
            parts = [first, *(part.removeprefix(" ") for part in parts[1:])]
        return parts


def typecode_of(vocab_size: int) -> str:
    """uint16 if all ids fit, otherwise int32; Megatron knows no other unsigned type."""
    return "H" if vocab_size <= 1 << 16 else "i"


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer puts a space before every text, as most sentencepiece models do."""
    first, whole = tokenizer.encode("x"), tokenizer.encode("x a")
    return whole != first + tokenizer.encode(" a") and whole == first + tokenizer.encode("a")


def _cut(text: str) -> Iterator[str]:
    """Cut a long text before spaces, where most tokenizers end a token anyway."""
    begin = 0
    while len(text) - begin > PART:
        end = text.rfind(" ", begin + PART // 2, begin + PART)
        while end > begin and text[end - 1] == " ":
            end -= 1
        end = end if end > begin else begin + PART
        yield text[begin:end]
        begin = end
    yield text[begin:]


def texts_in(block: Block, rules: Rules, source: Source) -> Iterator[str]:
    """The documents of a block as texts. Raises UserError."""
    try:
        yield from _Reading(rules).texts(block)
    except _Stop as stop:
        raise refusal_of(block, stop.refused, source) from None


def refusal_of(block: Block, refused: Refused, source: Source) -> UserError:
    what = "row" if source.format == "parquet" else "line"
    message = f"{source.path}, {what} {block.begin.line + refused.line + 1}: {refused.message}"
    return UserError(message, refused.hint)


class _Reading:
    """Reads the documents of a block, and counts what is wrong with them."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.text_bytes = self.empty = self.replaced = self.skipped = 0
        self.digests: list[bytes] = []
        self.sizes: list[int] = []

    def texts(self, block: Block) -> Iterator[str]:
        """The documents that are not empty; of a piece, its text, which may be."""
        if block.kind == PIECE:
            text = self._decoded(block.data, 0)
            self.text_bytes += len(block.data)
            is_empty = block.starts and block.ends and not text
            self.empty += is_empty
            yield from () if is_empty else [text]
            return
        for text in self._documents(block):
            if not text:
                self.empty += 1
                continue
            data = text.encode()
            self.text_bytes += len(data)
            if self.rules.hashes:
                self.digests.append(hashlib.blake2b(data, digest_size=16).digest())
                self.sizes.append(len(data))
            yield text

    def _documents(self, block: Block) -> Iterator[str]:
        if block.kind == TOO_LONG:
            if block.starts:
                self._invalid(0, "the line is longer than 64 MiB")
        elif block.kind == LONG_ROW:
            self._invalid(0, "the text is longer than 64 MiB")
        elif block.kind == PARQUET:
            for row, value in enumerate(texts_of_parquet(block.data)):
                yield self._decoded(value or b"", row)
        elif block.kind == "paragraph":
            yield from self._paragraphs(block.data)
        else:
            yield from self._lines(block)

    def _paragraphs(self, data: bytes) -> Iterator[str]:
        line, begin, separator = 0, 0, SEPARATORS["paragraph"]
        assert separator
        for end, after in (*map(re.Match.span, separator.finditer(data)), (len(data),) * 2):
            text = FIRST_LINES.sub(b"", data[begin:end])
            blank = data.count(b"\n", begin, end) - text.count(b"\n")
            if text := text.rstrip(LINE_ENDS):
                yield self._decoded(text, line + blank)
            line += data.count(b"\n", begin, after)
            begin = after

    def _lines(self, block: Block) -> Iterator[str]:
        lines = block.data.split(b"\n")
        if not lines[-1]:  # the block ends with a line break, which begins no line
            lines.pop()
        for number, line in enumerate(lines):
            text = self._decoded(line.removesuffix(b"\r"), number)
            if block.kind == "line":
                yield text
            # A blank line between JSON lines does not count as a document.
            elif text.strip("\ufeff \t") and (found := self._field(text, number)) is not None:
                yield found

    def _field(self, text: str, number: int) -> str | None:
        """The text in a JSON line; None if the line is invalid."""
        try:
            value = json.loads(text.lstrip("\ufeff"))
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
            self._invalid(number, f"not JSON: {reason}")
            return None
        if not isinstance(value, dict):
            self._invalid(number, "not a JSON object")
            return None
        found = value.get(self.rules.field)
        if not isinstance(found, str):
            known = ", ".join(map(repr, list(value)[:5]))
            what = "is not a text" if self.rules.field in value else f"is missing; it has {known}"
            self._invalid(number, f"the field {self.rules.field!r} {what}")
            return None
        return self._without_surrogates(found, number)

    def _without_surrogates(self, text: str, number: int) -> str:
        """JSON can contain half of a character, such as "\\ud800". No tokenizer accepts it."""
        text, count = _SURROGATE.subn("\ufffd", text)
        if count:
            self._replace(count, number, "an unpaired surrogate")
        return text

    def _decoded(self, data: bytes, line: int) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            text = data.decode(errors="replace")
            count = text.count("\ufffd") - data.count(_REPLACEMENT)
            self._replace(count, line + data.count(b"\n", 0, error.start), _described(error))
            return text

    def _replace(self, count: int, line: int, what: str) -> None:
        if self.rules.refuses_bytes:
            hint = "convert it, for example with iconv, or use --invalid-utf8 replace"
            raise _Stop(Refused(line, f"invalid UTF-8: {what}", hint))
        self.replaced += count

    def _invalid(self, line: int, message: str) -> None:
        if not self.rules.skips_lines:
            hint = "fix the line, choose another --field, or use --invalid-lines skip"
            raise _Stop(Refused(line, message, hint))
        self.skipped += 1


def _described(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} ({error.reason})"
