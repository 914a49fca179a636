"""Tokenizers: text to token ids and back. Torch-free and numpy-free.

`bytes` needs no file: a token per byte of the UTF-8 text. Everything else is read from local files,
and its library is imported only then (`bpe.py`, `pieces.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import UserError
from trainer.input_files import explain, read_bytes

BYTES = "bytes"  # the name of the tokenizer that needs no file
LARGEST_FILE = 1 << 28  # bytes of a tokenizer file; those of 250,000 tokens have 20 million
_EXPECTED = (
    "use bytes, a tokenizer.json, a folder with tokenizer.json or vocab.json and merges.txt, "
    "or a sentencepiece *.model"
)


class Tokenizer(Protocol):
    kind: str  # bytes, characters, bpe, sentencepiece
    vocab_size: int
    eos_id: int | None  # the token after each document
    digest: str  # SHA-256 of all that decides the ids: equal digests mean equal ids
    files: tuple[Path, ...]  # what to copy to have the tokenizer elsewhere

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token per byte, and one more for the end of a document."""

    kind, vocab_size = BYTES, 257
    eos_id: int | None = 256
    digest = hashlib.sha256(b"bytes: 0-255, end 256").hexdigest()
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class CharacterTokenizer:
    """A token per character of a vocabulary, as a CharDataset has them. It has no end token."""

    kind = "characters"
    eos_id: int | None = None
    files: tuple[Path, ...] = ()

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary, self.vocab_size = vocabulary, len(vocabulary)
        self.digest = hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest()
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self._token_of.keys())
        if unknown:
            message = f"the vocabulary of this model has no {unknown[0]!r}"
            raise UserError(message, f"it has these characters: {self.vocabulary!r}")
        return [self._token_of[character] for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.vocabulary[token] for token in ids if token < self.vocab_size)


def open_tokenizer(source: str, eos: str | None = None) -> Tokenizer:
    """Open `bytes`, a tokenizer.json, a folder with tokenizer files, or a sentencepiece model.

    `eos` names the end-of-document token, where the files do not say which one it is.
    """
    files = require_tokenizer(source, eos)
    if source == BYTES:
        return ByteTokenizer()
    # Both libraries are imported here only: `bytes` needs neither.
    if files[0].suffix == ".model":
        from trainer.corpus.pieces import PieceTokenizer

        return PieceTokenizer(files[0], eos)
    from trainer.corpus.bpe import BPETokenizer

    return BPETokenizer(files, eos)


def require_tokenizer(source: str, eos: str | None) -> tuple[Path, ...]:
    """The files of a tokenizer. Raises UserError if there are none; opens none of them."""
    if source != BYTES:
        return _files_of(Path(source))
    if eos:
        raise UserError("the tokenizer bytes has its own end token", "leave --eos out")
    return ()


def _files_of(path: Path) -> tuple[Path, ...]:
    """The files of a tokenizer, those that decide its ids first."""
    if not os.path.exists(path):
        raise UserError(f"no tokenizer at {path}: it does not exist", _EXPECTED)
    if path.is_dir():
        for names in (("tokenizer.json",), ("vocab.json", "merges.txt")):
            if all(os.path.exists(path / name) for name in names):
                return tuple(path / name for name in names)
        if models := sorted(path.glob("*.model")):
            return (models[0],)
        raise UserError(f"no tokenizer at {path}: none of its files is one", _EXPECTED)
    if path.name in ("vocab.json", "merges.txt"):
        return _files_of(path.parent)
    return (path,)


def read_tokenizer_file(file: Path) -> bytes:
    try:
        return read_bytes(file, LARGEST_FILE)
    except OSError as error:
        raise UserError(explain(str(file), error), _EXPECTED) from None


def digest_of(contents: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def refusal(file: Path, error: Exception) -> UserError:
    """What to say of a file that a tokenizer library does not accept."""
    return UserError(f"{file} is not a valid tokenizer file: {error}", _EXPECTED)


def identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """What data and checkpoints record of their tokenizer."""
    return {
        "kind": tokenizer.kind,
        "digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
