"""Finds the tokenizer of a checkpoint, and makes sure that it is the one of its training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer.corpus.tokenizer import (
    BYTES,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    open_tokenizer,
)
from trainer.errors import WRONG_USAGE, UserError
from trainer.tasks.arguments import Opened

FOLDER = "tokenizer"  # beside the checkpoints of a run, or inside of an imported one
HOW = "name it: --tokenizer bytes, or --tokenizer PATH (tokenizer.json, its folder, or a *.model)"


def tokenizer_of(opened: Opened, given: str | None) -> Tokenizer:
    """The tokenizer that was given, or the one that the checkpoint names. Raises UserError."""
    recorded = opened.facts.get("tokenizer")
    recorded = recorded if isinstance(recorded, dict) else {}
    tokenizer = _found(opened, given, recorded)
    _require_recorded(tokenizer, recorded, opened)
    _require_room(tokenizer, opened)
    return tokenizer


def _found(opened: Opened, given: str | None, recorded: dict[str, Any]) -> Tokenizer:
    if given not in (None, BYTES) and not os.path.lexists(str(given)):
        raise UserError(f"--tokenizer {given} does not exist", HOW, WRONG_USAGE)
    if given is not None:
        return open_tokenizer(given)
    vocabulary = opened.facts.get("vocabulary")
    if isinstance(vocabulary, str) and vocabulary:
        return CharacterTokenizer(vocabulary)
    if recorded.get("kind") == BYTES:
        return ByteTokenizer()
    for folder in places(opened.folder):
        if folder.is_dir():
            return open_tokenizer(str(folder))
    kind = recorded.get("kind")
    missing = f"its tokenizer ({kind}) is missing" if kind else "it does not name its tokenizer"
    raise UserError(f"cannot turn text into tokens for {opened.folder}: {missing}", HOW)


def places(checkpoint: Path) -> tuple[Path, Path]:
    """Where the files of a checkpoint's tokenizer may be."""
    # Not by the text of the path: `.` has a parent too.
    return checkpoint.resolve().parent / FOLDER, checkpoint / FOLDER


def _require_recorded(tokenizer: Tokenizer, recorded: dict[str, Any], opened: Opened) -> None:
    """With another tokenizer, the model would read other words than the user wrote."""
    digest = recorded.get("digest")
    if digest is not None and digest != tokenizer.digest:
        message = (
            f"this is not the tokenizer that {opened.folder} was trained with: it is "
            f"{tokenizer.kind} with {tokenizer.vocab_size:,} tokens (SHA-256 "
            f"{tokenizer.digest[:12]}…), the model's is {recorded.get('kind')} with "
            f"{recorded.get('vocab_size')} (SHA-256 {str(digest)[:12]}…)"
        )
        raise UserError(message, "use the tokenizer of the data that the model was trained on")


def _require_room(tokenizer: Tokenizer, opened: Opened) -> None:
    config = opened.facts.get("config")
    model = config.get("Model") if isinstance(config, dict) else None
    vocab_size = model.get("vocab_size") if isinstance(model, dict) else None
    if isinstance(vocab_size, int) and tokenizer.vocab_size > vocab_size:
        message = (
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model in "
            f"{opened.folder} only {vocab_size:,}"
        )
        raise UserError(message, "use the tokenizer of the data that the model was trained on")
