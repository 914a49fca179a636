"""Shows and verifies prepared data: `gptctl data inspect` and `gptctl data verify`. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checksums import damage_in
from trainer.corpus.extras import require
from trainer.corpus.metadata import (
    ENDING,
    Metadata,
    common_tokenizer,
    damaged_metadata_at,
    metadata_at,
    require_same,
    stem_of,
    tokenizer_beside,
)
from trainer.corpus.shards import ShardFolder
from trainer.corpus.token_files import HINT as TRAINER_HINT
from trainer.corpus.token_files import Corpus, TokenFile, open_corpus
from trainer.corpus.tokenizer import Tokenizer, open_tokenizer
from trainer.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FIX = "restore it from a copy, or prepare the data again with --overwrite"
_HINT = "write the --output of gptctl data prepare, a folder of token files, or one of them"
_CHUNK = 1 << 22  # tokens or documents to look at together
Advance = Callable[[int], None]  # called with the number of tokens that were verified


class Data(NamedTuple):
    """Token files, and what is known of them."""

    path: str
    corpus: Corpus
    metadata: Metadata | None

    @property
    def num_tokens(self) -> int:
        return int(self.corpus.lengths.sum())

    def facts(self) -> dict[str, Any]:
        lengths, tokenizer = self.corpus.lengths, self.metadata and self.metadata.tokenizer
        return {
            "path": self.path,
            "files": [str(file.prefix) for file in self.corpus.files],
            "documents": len(lengths),
            "tokens": self.num_tokens,
            "longest": int(lengths.max(initial=0)),
            "dtype": sorted({str(file.ids.dtype) for file in self.corpus.files}),
            "tokenizer": tokenizer,
            "eos_id": self.metadata.eos_id if self.metadata else None,
            "counts": self.metadata.content.get("counts") if self.metadata else None,
            "histogram": histogram(lengths),
        }

    def document(self, number: int) -> list[int]:
        if not 0 <= number < len(self.corpus.lengths):
            last = len(self.corpus.lengths) - 1
            raise UserError(f"there is no document {number}", f"use 0 to {last}")
        ids: list[int] = self.corpus.read(number, 0, int(self.corpus.lengths[number])).tolist()
        return ids

    def decoded(self, number: int, tokenizer: Tokenizer) -> str:
        """The text of a document, without its end token."""
        ids = self.document(number)
        if self.metadata and ids and ids[-1] == self.metadata.eos_id:
            ids = ids[:-1]
        return tokenizer.decode(ids)


def open_data(path: str) -> Data:
    require("numpy", "reading token files")
    _require_finished(path)
    try:
        return Data(path, open_corpus(path), common_tokenizer(metadata_at(path)))
    except UserError as error:
        # The hint of the trainer is about its config.
        hint = _HINT if error.hint == TRAINER_HINT else error.hint
        raise UserError(error.message, hint) from None


def _require_finished(path: str) -> None:
    shards = ShardFolder(Path(path)) if Path(path).name else None
    if shards and shards.has_begun and not os.path.lexists(f"{path}{ENDING}"):
        hint = "run the same gptctl data prepare command again: it continues where it was"
        raise UserError(f"{path} is not complete: prepare did not finish", hint)


def tokenizer_for(data: Data, source: str | None) -> Tokenizer:
    """The given tokenizer, or the one beside the data. Raises UserError if it is another one."""
    if source is None:
        if data.metadata is None:
            message = f"the tokenizer of {data.path} is unknown: it has no *{ENDING}"
            raise UserError(message, "name it with --tokenizer")
        return tokenizer_beside(data.metadata)
    tokenizer = open_tokenizer(source)
    if data.metadata is not None:
        require_same(tokenizer, data.metadata.tokenizer, str(data.metadata.file))
    return tokenizer


def histogram(lengths: npt.NDArray[np.int64]) -> dict[str, int]:
    """Documents by the bits of their length, as `summary.Counts` has them."""
    import numpy as np

    _, bits = np.frexp(lengths.astype(np.float64))
    found, numbers = np.unique(bits, return_counts=True)
    return {str(bit): int(number) for bit, number in zip(found, numbers)}


def verify(path: str, advance: Advance = lambda _: None) -> tuple[Data, list[str]]:
    """Read all data. Returns what is wrong with it; unreadable files are a UserError."""
    known = metadata_at(path)
    # First the checksums: they say which file is damaged, where the rest only says that one is.
    problems = [f"{file}: damaged metadata" for file in damaged_metadata_at(path)]
    problems += [problem for each in known for problem in _damage(each)]
    if problems:
        return Data(path, Corpus([]), None), problems
    data = open_data(path)
    for file in data.corpus.files:
        problems += _problems(file, data.metadata, advance)
    if len(known) == 1 and not problems:
        problems += _miscounted(data, known[0])
    return data, problems


def _damage(metadata: Metadata) -> Iterator[str]:
    folder = metadata.file.parent
    for name, facts in metadata.files.items():
        if Path(name).name != name:  # a crafted file must not make us read others
            yield f"{metadata.file} names a file outside of its folder: {name}"
        elif damage := damage_in(folder / name, facts):
            yield damage.replace(name, str(folder / name), 1)


def _problems(file: TokenFile, metadata: Metadata | None, advance: Advance) -> Iterator[str]:
    """Ids outside of the vocabulary, and documents that do not end with the end token."""
    vocabulary = metadata.vocab_size if metadata else None
    for first in range(0, len(file.ids), _CHUNK):
        part = file.ids[first : first + _CHUNK]
        low, high = int(part.min()), int(part.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            wrong = low if low < 0 else high
            yield f"{file.prefix}: token id {wrong} is outside the vocabulary of {vocabulary}"
            return
        advance(len(part))
    if metadata and metadata.eos_id is not None:
        yield from _without_end(file, metadata.eos_id)


def _without_end(file: TokenFile, eos_id: int) -> Iterator[str]:
    import numpy as np

    ends = np.cumsum(file.lengths)
    filled = np.flatnonzero(file.lengths)
    lacking = filled[file.ids[ends[filled] - 1] != eos_id]
    if len(lacking):
        yield f"{file.prefix}: document {int(lacking[0])} does not end with token {eos_id}"


def _miscounted(data: Data, metadata: Metadata) -> Iterator[str]:
    counts = metadata.content.get("counts")
    facts = data.facts()
    listed = {stem_of(name) for name in metadata.files}
    if not isinstance(counts, dict) or len(data.corpus.files) != len(listed):
        return  # other files are part of the corpus, too
    for name in ("documents", "tokens", "longest"):
        if counts.get(name) != facts[name]:
            yield f"{metadata.file}: {counts.get(name)} {name}, but the data has {facts[name]}"
