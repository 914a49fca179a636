"""Tokenizers. Oracles: the libraries of Hugging Face and Google called directly, and `str.encode`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2TokenizerFast

from tests.corpus.conftest import CHINESE, ENGLISH
from trainer.corpus.tokenizer import CharacterTokenizer, identity, open_tokenizer
from trainer.corpus.tokenizer_training import Training, train_tokenizer
from trainer.errors import UserError
from trainer.weights.tokenizer_files import tokenizer_files

TEXTS = [ENGLISH, CHINESE, "", " leading", "trailing ", "a  b\t\n\n c", "emoji 👩‍👩‍👧‍👦 é é", "<|endoftex", "\x00\x7f"]
anything = st.text(max_size=200)  # all of Unicode, without surrogates, which no UTF-8 has


def test_bytes_are_the_bytes() -> None:
    tokenizer = open_tokenizer("bytes")
    assert [tokenizer.encode(text) for text in TEXTS] == [list(text.encode()) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.files) == (257, 256, ())


def test_a_tokenizer_json_gives_the_ids_of_the_library(tokenizer_json: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    for source in (tokenizer_json, tokenizer_json.parent):
        tokenizer = open_tokenizer(str(source))
        assert tokenizer.encode_batch(TEXTS) == [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
        assert tokenizer.vocab_size == library.get_vocab_size()
        assert tokenizer.eos_id == library.token_to_id("<|endoftext|>")


def test_vocab_and_merges_give_the_ids_of_transformers(gpt2_files: Path) -> None:
    library = GPT2TokenizerFast.from_pretrained(str(gpt2_files))
    tokenizer = open_tokenizer(str(gpt2_files))
    assert tokenizer.encode_batch(TEXTS) == [library(text)["input_ids"] for text in TEXTS]
    assert tokenizer.eos_id == library.eos_token_id
    assert {file.name for file in tokenizer.files} == {"vocab.json", "merges.txt"}
    assert open_tokenizer(str(gpt2_files / "merges.txt")).digest == tokenizer.digest


def test_a_sentencepiece_model_gives_the_ids_of_the_library(piece_model: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    tokenizer = open_tokenizer(str(piece_model))
    assert tokenizer.encode_batch(TEXTS) == [library.encode(text) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (library.get_piece_size(), library.eos_id())


@settings(deadline=None, max_examples=150)
@given(anything)
def test_decoding_gives_back_any_text_in_bytes(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["tokenizer_json", "gpt2_files", "piece_model"])
def test_decoding_gives_back_any_text(request, kind: str) -> None:
    """The oracle is the text itself."""
    tokenizer = open_tokenizer(str(request.getfixturevalue(kind)))

    @settings(deadline=None, max_examples=150)
    @given(anything)
    def check(text: str) -> None:
        # Sentencepiece itself cannot tell its own space mark, and drops a NUL and what follows.
        if kind != "piece_model" or not set(text) & {"▁", "\x00"}:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_the_digest_follows_the_files_and_not_their_place(tmp_path: Path, gpt2_files: Path) -> None:
    shutil.copytree(gpt2_files, tmp_path / "copy")
    before = open_tokenizer(str(gpt2_files))
    assert identity(open_tokenizer(str(tmp_path / "copy"))) == identity(before)
    merges = (tmp_path / "copy" / "merges.txt").read_text().splitlines()
    (tmp_path / "copy" / "merges.txt").write_text("\n".join(merges[:-1]) + "\n")
    assert open_tokenizer(str(tmp_path / "copy")).digest != before.digest


def test_the_end_token(tmp_path: Path, tokenizer_json: Path) -> None:
    """Named by tokenizer_config.json, as transformers writes it, or by the user."""
    folder = tmp_path / "named"
    shutil.copytree(tokenizer_json.parent, folder)
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    assert open_tokenizer(str(folder)).eos_id == library.token_to_id("!")
    assert open_tokenizer(str(folder), eos="?").eos_id == library.token_to_id("?")
    with pytest.raises(UserError, match="no token '<nope>'"):
        open_tokenizer(str(folder), eos="<nope>")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.model").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name, message in (
        ("none", "does not exist"),
        ("empty", "none of its files"),
        ("tokenizer.json", "not a valid tokenizer file"),
        ("x.model", "not a valid tokenizer file"),
        ("pipe.json", "not a regular file"),
    ):
        with pytest.raises(UserError, match=message):
            open_tokenizer(str(tmp_path / name))


def test_characters() -> None:
    tokenizer = CharacterTokenizer("abc")
    assert tokenizer.decode(tokenizer.encode("cab")) == "cab"
    with pytest.raises(UserError, match="has no 'd'"):
        tokenizer.encode("abcd")


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_training_a_tokenizer(tmp_path: Path, text: str) -> None:
    """Oracle: the library loads the file, compresses what it was trained on, and decodes it."""
    (tmp_path / "in.txt").write_text(text * 30, encoding="utf-8")
    done = train_tokenizer(Training((str(tmp_path / "in.txt"),), str(tmp_path / "tok"), vocab_size=320))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    ids = library.encode(text).ids
    assert len(ids) < 0.8 * len(text.encode())
    assert library.decode(ids) == text
    assert done.tokenizer.vocab_size == library.get_vocab_size() <= 320
    assert done.tokenizer.eos_id == library.token_to_id("<|endoftext|>")
    with pytest.raises(UserError, match="already has a tokenizer"):
        train_tokenizer(Training((str(tmp_path / "in.txt"),), str(tmp_path / "tok")))
    with pytest.raises(UserError, match="vocab-size 100") as caught:
        train_tokenizer(Training((str(tmp_path / "in.txt"),), str(tmp_path / "new"), vocab_size=100))
    assert caught.value.hint == "use 257 or more"


def test_the_files_of_an_exported_tokenizer(tmp_path: Path, tokenizer_json: Path) -> None:
    """Also if its folder has a configuration of its own, as a trained one has."""
    folder = tmp_path / "own"
    shutil.copytree(tokenizer_json.parent, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    exported = tokenizer_files(open_tokenizer(str(folder)), 64)
    assert exported["tokenizer.json"] == tokenizer_json.read_bytes()
    assert json.loads(exported["tokenizer_config.json"])["model_max_length"] == 64


def test_a_tokenizer_is_trained_on_a_sample(tmp_path: Path) -> None:
    """Half of the blocks of one megabyte, by hand: two of four."""
    (tmp_path / "in.txt").write_text(ENGLISH * (4_000_000 // len(ENGLISH.encode())))
    request = Training((str(tmp_path / "in.txt"),), str(tmp_path / "tok"), 300, documents="line", sample_mb=2)
    done = train_tokenizer(request)
    assert 1.7e6 < done.text_bytes < 2.3e6
