"""The samples of an evaluation. Oracles: counting by hand, and what Megatron-LM's evaluation does with a text."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.corpus.tokenizer import ByteTokenizer, CharacterTokenizer
from trainer.errors import UserError
from trainer.tasks.eval_samples import Sample, Windows, cloze_samples, detokenized, perplexity_samples
from trainer.tasks.input_texts import Document, read_documents, read_prompts

BYTES = ByteTokenizer()


def windows(tokens: Sequence[int], length: int, stride: int) -> list[Sample]:
    return list(Windows([tokens], length, stride))


def test_windows_over_several_documents() -> None:
    """Some have no window. Oracle: each document alone."""
    documents = [[], [1], list(range(9)), [5], [], list(range(20, 23)), []]
    several = Windows(documents, 4, 2)
    alone = [sample for tokens in documents for sample in windows(tokens, 4, 2)]
    assert [several[number] for number in range(len(several))] == alone == several[:]
    assert several[1:3] == alone[1:3]
    with pytest.raises(IndexError):
        several[len(alone)]


def test_windows_take_no_memory() -> None:
    """A million tokens with a stride of 1 are a billion in all windows. Oracle: tracemalloc."""
    tokens = array("i", range(1_000_000))
    tracemalloc.start()
    samples = Windows([tokens], 1024, 1)
    assert samples[len(samples) - 1] == Sample(tokens[-1025:], 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 1_000_000 - 1024
    assert peak < 1 << 20


def test_windows_by_hand() -> None:
    tokens = list(range(8))
    assert windows(tokens, 4, 2) == [
        Sample([0, 1, 2, 3, 4], 4),  # scores 1 2 3 4
        Sample([2, 3, 4, 5, 6], 2),  # 5 6
        Sample([4, 5, 6, 7], 1),  # 7
    ]
    assert windows(tokens, 4, 4) == [Sample([0, 1, 2, 3, 4], 4), Sample([4, 5, 6, 7], 3)]
    assert windows(tokens, 99, 32) == [Sample(tokens, 7)]
    assert windows([5], 4, 2) == windows([], 4, 2) == []


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20))
def test_every_token_but_the_first_is_scored_once(count: int, length: int, stride: int) -> None:
    """And from at least length - stride tokens before it, or from all there are."""
    stride = min(stride, length)
    scored: list[int] = []
    for tokens, number in windows(range(count), length, stride):
        assert len(tokens) <= length + 1
        assert 1 <= number < len(tokens)
        first = tokens[-number]
        assert first - tokens[0] >= min(first, length - stride)
        scored += tokens[-number:]
    assert scored == list(range(1, count))


def test_words_and_tokens_by_hand() -> None:
    """Six words of 27 bytes: 26 predictions for 5 words, as Megatron-LM counts."""
    corpus = perplexity_samples([Document("one two three four five six")], BYTES, 100, 10)
    assert (corpus.num_tokens, corpus.num_words, corpus.is_detokenized) == (27, 6, False)
    assert corpus.token_ratio == 26 / 5
    two = perplexity_samples([Document("one two three"), Document("four five six")], BYTES, 100, 10)
    assert (two.num_tokens, two.num_words, len(two.samples)) == (26, 6, 2)
    assert two.token_ratio == (26 - 2) / (6 - 2)
    assert perplexity_samples([Document("word")], BYTES, 100, 10).token_ratio == 1.0


def test_wikitext_becomes_plain_text() -> None:
    """A title and a sentence in the style of wiki.valid.tokens, and how they were before."""
    text = ' = Robert = \n \n The " 2 @,@ 000 @-@ metre " race ( in 1990 @.@ 5 ) , Jones \'s first : see 5 ° N ; end . \n = = Life = = \n'
    plain = detokenized(text)
    assert plain == ' = Robert =\n\nThe "2,000-metre" race (in 1990.5), Jones\'s first: see 5°N; end.\n== Life ==\n'
    corpus = perplexity_samples([Document(text)], BYTES, 100, 10)
    assert corpus.is_detokenized
    assert corpus.num_tokens == len(plain.encode())
    assert corpus.num_words == len(text.strip().split(" "))  # counted before, as Megatron-LM does


def test_the_last_word() -> None:
    (sample,) = cloze_samples([Document("The cat sat on the mat\n")], BYTES, 100, "x")
    assert bytes(sample.tokens) == b"The cat sat on the mat"
    assert bytes(sample.tokens[-sample.scored :]) == b" mat"
    (short,) = cloze_samples([Document("The cat sat on the mat")], BYTES, 8, "x")
    assert bytes(short.tokens) == b" the mat"[-9:].rjust(9, b"n")


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("one", 100, "x:7: only one word: 'one'"),
        ("one incomprehensible", 10, "x:7: the last word has 17 tokens"),
    ],
)
def test_texts_without_a_last_word(text: str, length: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cloze_samples([Document(text, 7)], BYTES, length, "x")


def test_a_character_that_the_model_does_not_know() -> None:
    with pytest.raises(UserError, match="no 'd'"):
        perplexity_samples([Document("abcd")], CharacterTokenizer("abc"), 4, 2)


def write(folder: Path, name: str, data: str | bytes) -> str:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(file)


def test_files(tmp_path: Path) -> None:
    text = write(tmp_path, "a.txt", "\ufefffirst\r\n\nsecond\n")
    assert read_documents(text) == [Document("first\n\nsecond\n")]
    assert read_prompts(text) == ["first", "second"]
    lines = write(
        tmp_path, "a.jsonl", '{"text": "one", "id": 1}\n\n{"text": " "}\n{"text": "线\\n二", "prompt": "p"}\n'
    )
    assert read_documents(lines) == [Document("one", 1), Document("线\n二", 4)]
    assert read_prompts(lines) == ["one", "p"]
    assert read_documents(write(tmp_path, "b.txt", " \n")) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\nbad \xff\xfe", r"a\.txt:2: invalid UTF-8 at byte 9"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', r"a\.jsonl:2: invalid JSON"),
        ("a.jsonl", '["x"]', r"a\.jsonl:1: invalid JSON: not a JSON object"),
        ("a.jsonl", '{"text": 5}', r"a\.jsonl:1: no field `text` with a text"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: invalid JSON: nested"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read_documents(write(tmp_path, name, data))
    assert refused.value.hint
    assert refused.value.exit_code == 2


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_documents(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="is not a regular file"):
        read_documents(str(tmp_path))
