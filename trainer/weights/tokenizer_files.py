"""The files that give an exported model its tokenizer in Hugging Face's format. Torch-free.

Bytes and characters need no library here; there they are a BPE without merges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.corpus.tokenizer import BYTES, CharacterTokenizer, Tokenizer
from trainer.errors import UserError
from trainer.input_files import parse_object, read_bytes

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY, MERGES, SPECIAL = "vocab.json", "merges.txt", "special_tokens_map.json"
LARGEST = 1 << 28  # bytes of a file; those of large vocabularies have 20 million
END_OF_TEXT = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """File names and contents; empty for a tokenizer that GPT-2 has no class for."""
    if tokenizer.kind == BYTES:
        return _described(_bytes_json(), END_OF_TEXT, context)
    if isinstance(tokenizer, CharacterTokenizer):
        return _described(_characters_json(tokenizer.vocabulary), None, context)
    files = {_name_there(file): file for file in tokenizer.files}
    if TOKENIZER not in files and not {VOCABULARY, MERGES} <= files.keys():
        return {}  # a sentencepiece model
    try:
        copied = {name: read_bytes(file, LARGEST) for name, file in files.items()}
        end = _text_of(tokenizer.eos_id, copied)
    except (OSError, ValueError) as error:  # changed since it was opened
        raise UserError(f"cannot export the tokenizer: {error}", "check its files") from None
    kind = "PreTrainedTokenizerFast" if TOKENIZER in files else "GPT2Tokenizer"
    return {**copied, CONFIG: _json(_config(kind, end, context))}


def _name_there(file: Path) -> str:
    """A tokenizer.json may have any name here; the other files of a tokenizer have fixed ones."""
    is_other = file.suffix != ".json" or file.name in (VOCABULARY, CONFIG, SPECIAL)
    return file.name if is_other else TOKENIZER


def _text_of(token: int | None, files: dict[str, bytes]) -> str | None:
    """The text of a token, by the tokenizer's own files."""
    if token is None:
        return None
    if TOKENIZER not in files:
        vocabulary = parse_object(files[VOCABULARY])
    else:
        content = parse_object(files[TOKENIZER])
        for added in _items(content.get("added_tokens"), list):
            if isinstance(added, dict) and added.get("id") == token:
                return str(added.get("content"))
        vocabulary = _items(content.get("model"), dict).get("vocab")
    texts = vocabulary.items() if isinstance(vocabulary, dict) else ()
    return next((text for text, number in texts if number == token), None)


def _items(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else kind()


def _described(content: dict[str, Any], end: str | None, context: int) -> dict[str, bytes]:
    config = _config("PreTrainedTokenizerFast", end, context)
    return {TOKENIZER: _json(content), CONFIG: _json(config)}


def _config(kind: str, end: str | None, context: int) -> dict[str, Any]:
    ends = {name: end for name in ("bos_token", "eos_token") if end is not None}
    # Cleaning up would remove spaces before punctuation: decoded text must be the text.
    return {
        "tokenizer_class": kind,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **ends,
    }


def _bytes_json() -> dict[str, Any]:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    end = {"id": 256, "content": END_OF_TEXT, "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    return _bpe({**vocabulary, END_OF_TEXT: 256}, [end], level, level)


def _characters_json(characters: str) -> dict[str, Any]:
    vocabulary = {character: token for token, character in enumerate(characters)}
    return _bpe(vocabulary, [], None, {"type": "Fuse"})


def _bpe(vocabulary: dict[str, int], added: list[Any], before: Any, decoder: Any) -> dict[str, Any]:
    """A BPE without merges: every character of a text is a token."""
    unused = "dropout unk_token continuing_subword_prefix end_of_word_suffix".split()
    model: dict[str, Any] = {"type": "BPE", **dict.fromkeys(unused)}
    model |= {"fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {
        "version": "1.0",
        **nothing,
        "added_tokens": added,
        "pre_tokenizer": before,
        "decoder": decoder,
        "model": model,
    }


def _byte_characters() -> list[str]:
    """The printable character that GPT-2's byte-level BPE has for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )
