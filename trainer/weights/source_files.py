"""Opens the files of others: regular ones only, and no links, except those of a Hugging Face cache.

A link in a downloaded folder could lead to a private file, whose content would end up in a
checkpoint or beside it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.input_files import Unsuitable, explain, open_own, parse_object

LARGEST_JSON = 1 << 25  # bytes of config.json or of an index; the largest ones have a million
LARGEST_TOKENIZER = 1 << 28
HINT = "use a folder of Hugging Face, or a file with weights: *.safetensors, *.bin or *.pt"

AGAIN = "fetch the file again: it is not complete"


class CutOff(ValueError):
    """A file that ends too early, as after a download that was interrupted."""


def open_source(file: Path) -> int:
    """Open a file of others for reading. Raises OSError."""
    try:
        return open_own(file, os.O_RDONLY)
    except Unsuitable as error:
        if error.errno != errno.ELOOP or not _is_cached(file):
            raise
        return open_own(file.resolve(), os.O_RDONLY)


def _is_cached(link: Path) -> bool:
    """Whether a link is one of Hugging Face's cache: from snapshots/<revision>/ to blobs/."""
    folder = link.parent.resolve()
    is_snapshot = folder.parent.name == "snapshots"
    return is_snapshot and link.resolve().parent == folder.parent.parent / "blobs"


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn what is wrong with a file into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(explain(str(file), error), HINT) from None
    except ValueError as error:
        hint = AGAIN if isinstance(error, CutOff) else HINT
        raise UserError(f"cannot import {file}: {error}", hint) from None


def read_source(file: Path, most: int) -> bytes:
    """The content of a small file. Raises UserError."""
    with explained(file), open(open_source(file), "rb") as stream:
        data = stream.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most} bytes")
        return data


def read_json(file: Path) -> dict[str, Any]:
    data = read_source(file, LARGEST_JSON)
    with explained(file):
        return parse_object(data)


def exists(file: Path) -> bool:
    """Also true for a link that leads nowhere, which is then refused."""
    return os.path.lexists(file)
