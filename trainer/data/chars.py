"""The characters of one text as tokens, in windows of block_size + 1, split into train and valid.

Each split is one continuous stretch of the text. With random windows, evaluation would see text
that overlaps with training windows. The start of the stretch depends only on the seed.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.config.sections import Dataset
from trainer.data.order import Numbers, permuted
from trainer.errors import UserError
from trainer.input_files import explain, open_regular

BUILTIN = "builtin"
BUILTIN_CHARACTERS = 2_000_000  # enough for the demo, and quick to read


class Characters:
    """A text, its vocabulary, and the number of windows in it."""

    def __init__(self, dataset: Dataset) -> None:
        text = _builtin_text() if dataset.path == BUILTIN else _read_text(str(dataset.path))
        text = text[: int(len(text) * dataset.truncate)]
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)  # one number per character
        self.length = len(codes)
        self.block = dataset.max_seq_len
        self.windows = self.length - self.block
        if self.windows < 1:
            raise UserError(
                f"{dataset.path} has {self.length} characters, "
                f"but one sample needs {self.block + 1}",
                "reduce Data.Train.dataset.max_seq_len, raise truncate, or use a longer text",
            )
        # Sorted by code point, as in minGPT.
        unique = np.flatnonzero(np.bincount(codes))
        self.vocabulary = "".join(map(chr, unique))
        token_of = np.zeros(unique[-1] + 1, dtype=np.uint16 if len(unique) < 1 << 16 else np.int32)
        token_of[unique] = np.arange(len(unique))
        self.tokens = token_of[codes]
        self.num_train = max(1, int(self.windows * dataset.train_split))  # train is never empty

    def decode(self, tokens: list[int]) -> str:
        return "".join(
            self.vocabulary[token] if token < len(self.vocabulary) else "" for token in tokens
        )


class CharSplit:
    """The windows of one split, in a new random order in every epoch."""

    eos: int | None = None
    covers_epochs = False

    def __init__(self, characters: Characters, name: str, seed: int) -> None:
        self.characters, self.name, self.seed = characters, name, seed
        self.digest = zlib.crc32(characters.tokens.tobytes())
        self.size = (
            characters.num_train if name == "train" else characters.windows - characters.num_train
        )
        start = int(permuted(np.zeros(1, np.int64), characters.windows, seed, "split")[0])
        self.start = start if name == "train" else start + characters.num_train

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The samples with these numbers in these epochs: (samples, block + 1) tokens."""
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permuted(
                numbers[here] % self.size, self.size, self.seed, self.name, int(epoch)
            )
        # The stretch may start anywhere, so it continues at the beginning of the text.
        offsets = (self.start + places) % self.characters.windows
        return self.characters.tokens[
            offsets[:, None] + np.arange(self.characters.block + 1)
        ].astype(np.int64)


def _read_text(path: str) -> str:
    try:
        with open(open_regular(path), encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise UserError(explain(path, error), "check Data.Train.dataset.path") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        message = f"{path} is not UTF-8 text: byte {error.start} is {byte:#04x}"
        raise UserError(message, "convert it, for example with iconv -t utf-8") from None


def _builtin_text() -> str:
    """The source code of Python's standard library.

    Every machine has it, and it is the same for all users of one Python version.
    """
    texts, length = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if not text.isascii():  # a few strings would double the vocabulary
            continue
        texts.append(text)
        length += len(text)
        if length >= BUILTIN_CHARACTERS:
            break
    if not texts:
        raise UserError(
            "the demo corpus is not available: this Python has no source files",
            "set Data.Train.dataset.path to a text file",
        )
    return "".join(texts)[:BUILTIN_CHARACTERS]
