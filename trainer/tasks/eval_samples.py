"""The samples of an evaluation: windows over documents, or texts with their last word. Torch-free.

As in Megatron-LM and FleetX: windows overlap, so that tokens are predicted from much context, but
every token counts once (WikiText); and the last word of a text is predicted from the rest of it
(LAMBADA).
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, overload

from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.tasks.input_texts import Document

# How WikiText writes numbers and titles; other texts hardly contain them.
_WIKITEXT = re.compile(r" @[-,.]@ |^ = .* = $", re.MULTILINE)
_JOINED = {"-": "-", ",": ",", ".": "."}  # inside of numbers and compounds
_NOT_AFTER_A_BLANK = ":;.!?,"
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
_QUOTES = "\"'"


class Sample(NamedTuple):
    """Tokens of which the last ones are scored: `scored` of them. The first one never is."""

    tokens: Sequence[int]
    scored: int


class Windows(Sequence[Sample]):
    """Windows of `length` predictions, each `stride` after the one before. Scores tokens once.

    Each is made when it is needed: all of them together are many times as large as the text.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, stride: int) -> None:
        self._documents, self._length, self._stride = documents, length, stride
        counts = (num_windows(len(tokens), length, stride) for tokens in documents)
        self._firsts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._window(number) for number in numbers]
        return self._window(numbers)

    def _window(self, number: int) -> Sample:
        document = bisect_right(self._firsts, number) - 1
        tokens, begin = self._documents[document], self._stride * (number - self._firsts[document])
        end = min(begin + self._length + 1, len(tokens))
        # The window before has scored the tokens up to its end; the first token never is.
        scored_until = begin - self._stride + self._length + 1 if begin else 1
        return Sample(tokens[begin:end], end - scored_until)


def num_windows(count: int, length: int, stride: int) -> int:
    """How many windows score all tokens of a document but the first one."""
    return 1 + -(-max(0, count - 1 - length) // stride) if count > 1 else 0


class Corpus(NamedTuple):
    """All documents as samples, and what adjusts their perplexity."""

    samples: Sequence[Sample]
    num_documents: int
    num_tokens: int  # before the first of each document is left out
    num_words: int  # separated by blanks, as Megatron-LM counts them
    is_detokenized: bool

    @property
    def token_ratio(self) -> float:
        """Scored tokens per word: perplexities of different tokenizers become comparable."""
        words = self.num_words - self.num_documents
        return (self.num_tokens - self.num_documents) / words if words > 0 else 1.0


def perplexity_samples(
    documents: Sequence[Document], tokenizer: Tokenizer, length: int, stride: int
) -> Corpus:
    texts = [document.text for document in documents]
    is_wikitext = any(map(_WIKITEXT.search, texts))
    plain = list(map(detokenized, texts)) if is_wikitext else texts
    # A third of the memory of a list.
    encoded = [array("i", tokens) for tokens in tokenizer.encode_batch(plain)]
    samples = Windows(encoded, length, stride)
    words = sum(len(text.strip().split(" ")) for text in texts)
    return Corpus(samples, len(texts), sum(map(len, encoded)), words, is_wikitext)


def cloze_samples(
    documents: Sequence[Document], tokenizer: Tokenizer, length: int, path: str
) -> list[Sample]:
    """Each text, of which the tokens of the last word are scored."""
    parts = [_without_last_word(document, path) for document in documents]
    contexts = tokenizer.encode_batch([context for context, _ in parts])
    words = tokenizer.encode_batch([word for _, word in parts])
    samples = []
    for document, context, word in zip(documents, contexts, words):
        if len(word) > length:
            message = f"{path}:{document.line}: the last word has {len(word):,} tokens"
            raise UserError(message, f"the model has {length:,} positions: leave this line out")
        # The end of a text that is too long: that is what its last word depends on most.
        samples.append(Sample([*context, *word][-(length + 1) :], len(word)))
    return samples


def _without_last_word(document: Document, path: str) -> tuple[str, str]:
    words = document.text.split()
    if len(words) < 2:
        message = f"{path}:{document.line}: only one word: {words[0][:60]!r}"
        raise UserError(message, "a cloze text needs a word to predict, and others before it")
    begin = document.text.rfind(words[-1])
    return document.text[:begin].strip(), f" {words[-1]}"


def detokenized(text: str) -> str:
    """Undo WikiText's tokenization: a model was trained on plain text.

    The rules of Megatron-LM's evaluation, so that numbers can be compared with its own.
    """
    text = text.replace("s '", "s'")
    for mark, plain in _JOINED.items():
        text = text.replace(f" @{mark}@ ", plain)
    for mark in _NOT_AFTER_A_BLANK:
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in _BRACKETS:
        o, c = re.escape(opening), re.escape(closing)
        text = re.sub(rf"{o}\s*([^{c}]*?)\s*{c}", rf"{opening}\1{closing}", text)
    for quote in _QUOTES:
        text = re.sub(rf"{quote}\s*([^{quote}]*?)\s*{quote}", rf"{quote}\1{quote}", text)
    for depth in (4, 3, 2):
        text = text.replace(" ".join("=" * depth), "=" * depth)
    for spaced, joined in (
        (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
    ):  # fmt: skip
        text = text.replace(spaced, joined)
    return text
