"""Characters of one text as tokens: windows of block_size + 1, cut into a part to train on and a part to evaluate.

The parts are stretches of the text, so that evaluation does not meet windows that training has nearly seen; where the
stretch begins depends on the seed alone.
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

BUILTIN = "builtin"
BUILTIN_CHARACTERS = 2_000_000


class Characters:
    """A text, its vocabulary, and the number of windows in it."""

    def __init__(self, dataset: Dataset) -> None:
        text = _builtin_text() if dataset.path == BUILTIN else _read_text(str(dataset.path))
        text = text[: int(len(text) * dataset.truncate)]
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        self.length = len(codes)
        self.block = dataset.max_seq_len
        self.windows = self.length - self.block
        if self.windows < 1:
            raise UserError(
                f"{dataset.path} has {self.length} characters, one sample needs {self.block + 1}",
                "shorten Data.Train.dataset.max_seq_len, raise truncate, or use a longer text",
            )
        unique = np.flatnonzero(np.bincount(codes))
        self.vocabulary = "".join(map(chr, unique))
        token_of = np.zeros(unique[-1] + 1, dtype=np.uint16 if len(unique) < 1 << 16 else np.int32)
        token_of[unique] = np.arange(len(unique))
        self.tokens = token_of[codes]
        self.num_train = max(1, int(self.windows * dataset.train_split))

    def decode(self, tokens: list[int]) -> str:
        return "".join(
            self.vocabulary[token] if token < len(self.vocabulary) else "" for token in tokens
        )


class CharSplit:
    """The windows of one part, in an order of their own in every epoch."""

    eos: int | None = None

    def __init__(self, characters: Characters, name: str, seed: int) -> None:
        self.characters, self.name, self.seed = characters, name, seed
        self.digest = zlib.crc32(characters.tokens.tobytes())
        self.size = (
            characters.num_train if name == "train" else characters.windows - characters.num_train
        )
        start = int(permuted(np.zeros(1, np.int64), characters.windows, seed, "split")[0])
        self.start = start if name == "train" else start + characters.num_train

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The samples with these numbers of these epochs: (samples, block + 1) tokens."""
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permuted(
                numbers[here] % self.size, self.size, self.seed, self.name, int(epoch)
            )
        offsets = (self.start + places) % self.characters.windows
        return self.characters.tokens[
            offsets[:, None] + np.arange(self.characters.block + 1)
        ].astype(np.int64)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "check Data.Train.dataset.path"
        ) from None
    except UnicodeDecodeError as error:
        message = f"{path} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise UserError(message, "convert it, such as with iconv -t utf-8") from None


def _builtin_text() -> str:
    """Python's own sources: a text that every machine has, the same for every user of one Python version."""
    texts, length = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if not text.isascii():  # a few test strings would double the vocabulary
            continue
        texts.append(text)
        length += len(text)
        if length >= BUILTIN_CHARACTERS:
            break
    if not texts:
        raise UserError(
            "this Python comes without its sources", "name a text file as Data.Train.dataset.path"
        )
    return "".join(texts)[:BUILTIN_CHARACTERS]
