"""Turns the tokens of a text into characters as they arrive, and finds stop words. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.corpus.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # how a tokenizer decodes a part of a character


class TextStream:
    """The text of some tokens. A character may need several tokens, and a stop word too."""

    def __init__(self, tokenizer: Tokenizer, stop_words: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_words = tokenizer, stop_words
        self.text, self.is_stopped = "", False
        self._ids: list[int] = []
        # Tokens from `_begin` are decoded again: what a token means may depend on those before it.
        self._begin = self._read = self._shown = 0

    def add(self, token: int) -> bool:
        """Add a token. Returns whether a stop word is complete: the text ends before it."""
        self._ids.append(token)
        known = self.tokenizer.decode(self._ids[self._begin : self._read])
        now = self.tokenizer.decode(self._ids[self._begin :])
        if not now.endswith(_INCOMPLETE):
            self._append(now[len(known) :])
            self._begin, self._read = self._read, len(self._ids)
        return self.is_stopped

    def take(self) -> str:
        """New text since the last call, except what may be the beginning of a stop word."""
        end = len(self.text) if self.is_stopped else len(self.text) - self._held()
        new, self._shown = self.text[self._shown : end], max(self._shown, end)
        return new

    def finish(self) -> str:
        """The rest of the text, when no token will follow."""
        if not self.is_stopped:
            known = self.tokenizer.decode(self._ids[self._begin : self._read])
            self._append(self.tokenizer.decode(self._ids[self._begin :])[len(known) :])
            self._begin = self._read = len(self._ids)
        new, self._shown = self.text[self._shown :], len(self.text)
        return new

    def _append(self, new: str) -> None:
        before = len(self.text)
        self.text += new
        found = [
            place
            for word in self.stop_words
            if (place := self.text.find(word, max(0, before - len(word) + 1))) >= 0
        ]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """The length of the longest end of the text with which a stop word begins."""
        lengths = (
            length
            for word in self.stop_words
            for length in range(min(len(word) - 1, len(self.text)), 0, -1)
            if self.text.endswith(word[:length])
        )
        return max(lengths, default=0)
