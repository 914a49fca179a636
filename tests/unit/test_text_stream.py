"""Text from tokens that arrive one by one. Oracle: the decoder, called once with all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.corpus.tokenizer import ByteTokenizer, CharacterTokenizer
from trainer.inference.text_stream import TextStream

BYTES = ByteTokenizer()


def pieces(text: str | bytes, *stops: str) -> tuple[list[str], TextStream]:
    stream, shown = TextStream(BYTES, stops), []
    for token in text.encode() if isinstance(text, str) else text:
        is_complete = stream.add(token)
        shown.append(stream.take())
        if is_complete:
            break
    return [*shown, stream.finish()], stream


@given(st.text(max_size=30))
def test_pieces_are_the_text(text: str) -> None:
    shown, stream = pieces(text)
    assert "".join(shown) == stream.text == text
    assert "\ufffd" not in "".join(shown) or "\ufffd" in text


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_are_shown_as_the_decoder_shows_them(data: bytes) -> None:
    shown, stream = pieces(data)
    assert "".join(shown) == stream.text == data.decode(errors="replace")


def test_a_character_appears_with_its_last_byte() -> None:
    assert pieces("a你b")[0] == ["a", "", "", "你", "b", ""]
    assert pieces("你".encode()[:2])[0] == ["", "", "\ufffd"]  # the text ended within a character


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_the_first_stop_word(text: str, stops: list[str]) -> None:
    """Oracle: by each prefix of the text, whether it contains a stop word."""
    shown, stream = pieces(text, *stops)
    ends = [end for end in range(1, len(text) + 1) if any(stop in text[:end] for stop in stops)]
    expected = text
    if ends:
        seen = text[: ends[0]]
        expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert "".join(shown) == stream.text == expected
    assert stream.is_stopped == bool(ends)


def test_nothing_of_a_stop_word_is_shown() -> None:
    shown, _ = pieces("ab\n\nc", "\n\n")
    assert shown == ["a", "b", "", "", ""]
    shown, _ = pieces("ab\nc", "\n\n")
    assert shown == ["a", "b", "", "\nc", ""]


@pytest.mark.parametrize("text", ["", "abc"])
def test_characters(text: str) -> None:
    tokenizer = CharacterTokenizer("abc")
    stream = TextStream(tokenizer)
    for token in tokenizer.encode(text):
        stream.add(token)
    assert stream.finish() == text
