"""Sentencepiece models (`*.model`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.corpus.extras import require
from trainer.corpus.tokenizer import digest_of, read_tokenizer_file, refusal
from trainer.errors import UserError


class PieceTokenizer:
    kind = "sentencepiece"

    def __init__(self, file: Path, eos: str | None = None) -> None:
        content = read_tokenizer_file(file)
        sentencepiece = require("sentencepiece", f"the tokenizer {file}")
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises plain exceptions
            raise refusal(file, error) from None
        self.digest = digest_of([content])
        self.files: tuple[Path, ...] = (file,)
        self.vocab_size = int(self._inner.get_piece_size())
        self.eos_id = self._end(file, eos)

    def _end(self, file: Path, eos: str | None) -> int | None:
        if eos is None:
            own = int(self._inner.eos_id())
            return own if own >= 0 else None
        token = int(self._inner.piece_to_id(eos))
        if self._inner.id_to_piece(token) != eos:  # unknown pieces have the id of <unk>
            raise UserError(f"{file} has no token {eos!r}", "use one of its pieces, or --no-eos")
        return token

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: `prepare` has a process per core.
        ids: list[list[int]] = self._inner.encode(list(texts), num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        # The library refuses ids that it does not have, such as those of a padded vocabulary.
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        text: str = self._inner.decode(known)
        return text
