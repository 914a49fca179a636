"""`gptctl data train-tokenizer`: a byte-level BPE from text. Torch-free and numpy-free.

Byte-level, so that every text of every language can be encoded, and decoding gives back the text.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.corpus.blocks import PIECE, Block, Cutting, Position, blocks_of
from trainer.corpus.encoding import Rules, texts_in
from trainer.corpus.extras import require
from trainer.corpus.sources import find_sources, require_inputs
from trainer.corpus.tokenizer import Tokenizer, identity, open_tokenizer
from trainer.durable import replacing
from trainer.errors import UserError

END = "<|endoftext|>"
SAMPLE_MB = 1000.0
STARTS_AGAIN = "nothing was written; the same command starts from the beginning"
_BYTES = 256  # a token for each byte
POLL = 0.1  # seconds
# Called every POLL seconds with the bytes that were read meanwhile; may raise to stop the training.
Advance = Callable[[int], None]


class Training(NamedTuple):
    """What the user asked for."""

    inputs: tuple[str, ...]
    output: str
    vocab_size: int = 32000
    eos: str = END
    input_format: str | None = None
    documents: str = "file"
    field: str = "text"
    sample_mb: float = SAMPLE_MB
    invalid_utf8: str = "replace"
    invalid_lines: str = "refuse"
    overwrite: bool = False


class Trained(NamedTuple):
    tokenizer: Tokenizer
    text_bytes: int  # that were read
    total_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {**identity(self.tokenizer), "text_bytes": self.text_bytes}


def train_tokenizer(request: Training, advance: Advance = lambda _: None) -> Trained:
    library = require("tokenizers", "training a tokenizer")
    folder = Path(request.output)
    _check(request, folder)
    sample = _Sample(request)
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=request.vocab_size,
        # All bytes, not only those that occur: any text can then be encoded.
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[request.eos],
        show_progress=False,
    )
    _train(inner, trainer, sample, advance)
    if not sample.text_bytes:
        raise UserError("the inputs contain no text", "check them, and --field or --documents")
    _write(folder, inner.to_str(pretty=True), request.eos)
    return Trained(open_tokenizer(str(folder)), sample.text_bytes, sample.total_bytes)


def _train(inner: Any, trainer: Any, sample: _Sample, advance: Advance) -> None:
    """Train in a thread. The library returns after minutes or hours: no signal was handled before.

    If `advance` raises, the thread cannot be stopped: it ends with the process, which has to exit
    without the interpreter's clean-up (`os._exit`). Nothing was written by then.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            inner.train_from_iterator(sample.texts(), trainer)
        except BaseException as error:
            failed.append(error)

    thread, reported = threading.Thread(target=work, daemon=True), 0
    thread.start()
    while thread.is_alive():
        thread.join(POLL)
        done = sample.done
        advance(done - reported)
        reported = done
    if failed:
        raise failed[0]


def check_training(request: Training) -> None:
    """Raise UserError if the training could not start here."""
    require_inputs(request.inputs, request.input_format)
    _check(request, Path(request.output))


def _check(request: Training, folder: Path) -> None:
    least = _BYTES + 1
    if request.vocab_size < least:
        message = f"--vocab-size {request.vocab_size}: a token for each byte and the end token"
        raise UserError(message, f"use {least} or more")
    if os.path.exists(folder / "tokenizer.json") and not request.overwrite:
        message = f"{folder} already has a tokenizer"
        raise UserError(message, "use another --output, or --overwrite to replace it")


class _Sample:
    """The texts to train on: all blocks, or evenly spread ones if there are too many."""

    def __init__(self, request: Training) -> None:
        self.request = request
        self.sources = find_sources(request.inputs, request.input_format)
        self.total_bytes = sum(source.size for source in self.sources)
        self.share = min(1.0, request.sample_mb * 1e6 / max(1, self.total_bytes))
        self.text_bytes = 0
        self.done = 0  # bytes that were read

    def texts(self) -> Iterator[str]:
        request, taken = self.request, 0.0
        rules = Rules(
            request.field,
            refuses_bytes=request.invalid_utf8 == "refuse",
            skips_lines=request.invalid_lines == "skip",
        )
        cutting = Cutting(request.documents, request.field)
        for block in blocks_of(self.sources, cutting, Position()):
            self.done = block.done
            # A block is used whenever the share of all blocks reaches the next whole number.
            taken += self.share
            if taken >= 1 - 1e-9:
                taken -= 1
                yield from self._of(block, rules)

    def _of(self, block: Block, rules: Rules) -> Iterator[str]:
        for text in texts_in(block, rules, self.sources[block.begin.source]):
            self.text_bytes += len(text.encode())
            if block.kind == PIECE or len(text) > 1 << 16:
                yield from _lines(text)
            else:
                yield text


def _lines(text: str) -> Iterator[str]:
    """Cut a long text: the library works on many texts at once, and keeps each in memory."""
    for first in range(0, len(text), 1 << 16):
        yield text[first : first + (1 << 16)]


def _write(folder: Path, text: str, eos: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # What `transformers` reads beside tokenizer.json, so that both agree on the end token.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    for name, content in (
        ("tokenizer_config.json", json.dumps(config, indent=1, ensure_ascii=False)),
        ("tokenizer.json", text),
    ):
        with replacing(folder / name) as stream:
            stream.write(content.encode())
