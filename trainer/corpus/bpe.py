"""Tokenizers of Hugging Face's library: tokenizer.json, or GPT-2's vocab.json and merges.txt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.corpus.extras import require
from trainer.corpus.tokenizer import LARGEST_FILE, digest_of, read_tokenizer_file, refusal
from trainer.errors import UserError
from trainer.input_files import read_object

# Not part of the digest: they name special tokens, but do not change the ids of a text.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
# The end tokens of well-known vocabularies, for files that do not name theirs.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|endofdoc|>", "<eod>", "<eos>", "[EOS]")


class BPETokenizer:
    """Any tokenizer of the library `tokenizers`; most of them are BPE."""

    kind = "bpe"

    def __init__(self, files: Sequence[Path], eos: str | None = None) -> None:
        contents = [read_tokenizer_file(file) for file in files]
        # Without this, the library starts its own threads in every worker process.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._inner = _opened(files, contents)
        self.digest = digest_of(contents)
        folder = files[0].parent
        companions = [folder / name for name in _COMPANIONS if os.path.isfile(folder / name)]
        self.files = (*files, *companions)
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Not the number of tokens: their ids may have gaps.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id = _end_of(vocabulary, eos or _named_end(companions), files[0], bool(eos))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast variant leaves out the offsets of tokens, which nobody here needs. Special
        # tokens are not added: `prepare` decides what ends a document.
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text


def _opened(files: Sequence[Path], contents: Sequence[bytes]) -> Any:
    tokenizers = require("tokenizers", f"the tokenizer {files[0]}")
    try:
        if len(files) == 1:
            inner = tokenizers.Tokenizer.from_str(contents[0].decode())
            # A tokenizer.json may contain settings of its training that would change documents.
            inner.no_truncation()
            inner.no_padding()
            return inner
        model = tokenizers.models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises plain exceptions
        raise refusal(files[0], error) from None
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def _named_end(companions: Sequence[Path]) -> str | None:
    """The end token that a tokenizer_config.json names, as a text or with its properties."""
    for file in companions:
        try:
            named = read_object(file, LARGEST_FILE).get("eos_token")
        except (OSError, ValueError) as error:
            raise refusal(file, error) from None
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            return named
    return None


def _end_of(
    vocabulary: dict[str, int], named: str | None, file: Path, is_chosen: bool
) -> int | None:
    if named in vocabulary:
        return vocabulary[named]
    if is_chosen:
        hint = "use a token of its vocabulary, or --no-eos"
        raise UserError(f"{file} has no token {named!r}", hint)
    return next((vocabulary[end] for end in _ENDS if end in vocabulary), None)
