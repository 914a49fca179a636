"""Small tokenizers, trained once by the libraries themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

ENGLISH = "The cat sat on the mat, and the dog didn't. It's 12 o'clock; we'll see 345 naïve cafés.\n"
CHINESE = "数据准备：把文本变成词元，然后训练模型。今天天气很好，我们一起去公园散步。\n"


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory) -> Path:
    """vocab.json and merges.txt, in GPT-2's format, by the library's own byte-level BPE."""
    folder = tmp_path_factory.mktemp("gpt2")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [ENGLISH, CHINESE] * 20, vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save_model(str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [ENGLISH, CHINESE] * 20, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def piece_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([ENGLISH.strip(), CHINESE.strip()] * 40),
        model_prefix=str(folder / "spm"),
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return folder / "spm.model"


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file
