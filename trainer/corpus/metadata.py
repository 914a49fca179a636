"""What is known of prepared data: `<PREFIX>_meta.json` beside it. Torch-free and numpy-free.

`prepare` writes it. The trainer, and `gptctl validate`, read it to find data that does not fit the
model, and to record the tokenizer in checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checksums import is_facts
from trainer.corpus.tokenizer import Tokenizer, open_tokenizer
from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import read_bytes, read_object

ENDING = "_meta.json"
FOLDER = "tokenizer"  # beside the data, and in an output folder
VERSION = 1
_LARGEST = 1 << 26  # bytes; it has a line per output file
IDENTITY = ("kind", "digest", "vocab_size", "eos_id")


class Metadata(NamedTuple):
    file: Path
    content: dict[str, Any]

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Kind, digest, vocab_size and eos_id."""
        return {key: self.content["tokenizer"].get(key) for key in IDENTITY}

    @property
    def vocab_size(self) -> int:
        return int(self.content["tokenizer"]["vocab_size"])

    @property
    def eos_id(self) -> int | None:
        """The token at the end of each document; None if documents have none."""
        token: int | None = self.content["tokenizer"]["eos_id"]
        return token if self.content.get("eos") else None

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.content["files"]
        return found


def write_metadata(prefix: Path, content: dict[str, Any]) -> None:
    text = json.dumps({"version": VERSION, **content}, indent=1, ensure_ascii=False)
    with replacing(prefix.with_name(prefix.name + ENDING)) as stream:
        stream.write(text.encode())


def read_metadata(file: Path) -> Metadata | None:
    """None if it is not a file of this program, or damaged: then nothing is known of the data."""
    try:
        found = Metadata(file, read_object(file, _LARGEST))
        is_valid = found.content["version"] == VERSION and _is_identity(found.content["tokenizer"])
        return found if is_valid and all(map(is_facts, found.files.values())) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_identity(value: dict[str, Any]) -> bool:
    names = value.get("files", [])
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    texts = is_list and all(isinstance(value[key], str) for key in ("kind", "digest"))
    end = value["eos_id"]
    return texts and type(value["vocab_size"]) is int and (end is None or type(end) is int)


def metadata_at(path: str | os.PathLike[str]) -> list[Metadata]:
    """All that is known of the data at a folder, a file or a prefix; see `token_files.py`."""
    name = None if os.path.isdir(path) else Path(path).name
    found = map(read_metadata, _files_beside(path))
    return [each for each in found if each and (name is None or _describes(each, name))]


def damaged_metadata_at(path: str | os.PathLike[str]) -> list[Path]:
    """Files that should describe the data there, but cannot be read."""
    own = None if os.path.isdir(path) else stem_of(Path(path).name) + ENDING
    files = (file for file in _files_beside(path) if own in (None, file.name))
    return [file for file in files if read_metadata(file) is None]


def _files_beside(path: str | os.PathLike[str]) -> list[Path]:
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    names: Collection[str] = ()
    with suppress(OSError):
        names = sorted(each for each in os.listdir(folder) if each.endswith(ENDING))
    return [folder / each for each in names]


def _describes(metadata: Metadata, name: str) -> bool:
    """Whether it is about a file with this name, or a prefix."""
    is_prefix = metadata.file.name == name + ENDING
    stems = {stem_of(file) for file in metadata.files}
    return is_prefix or name in metadata.files or name in stems


def stem_of(name: str) -> str:
    """The prefix of a token file, without its folder."""
    for ending in ("_ids.npz", "_ids.npy", "_idx.npz", ".idx", ".bin"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def common_tokenizer(known: Iterable[Metadata]) -> Metadata | None:
    """The one tokenizer of several data sets, or None if it is unknown. Raises UserError."""
    known = [*known]
    for each in known[1:]:
        if each.tokenizer["digest"] != known[0].tokenizer["digest"]:
            message = f"{known[0].file} and {each.file} come from different tokenizers"
            raise UserError(message, "prepare all data of a run with the same tokenizer")
    return known[0] if known else None


def misfit(metadata: Metadata, vocab_size: int) -> tuple[str, str] | None:
    """Why data cannot be used with a model of this vocabulary, and what to do; None if it can."""
    if metadata.vocab_size <= vocab_size:
        return None
    message = (
        f"the tokenizer of {metadata.file} has {metadata.vocab_size} tokens, "
        f"but Model.vocab_size is {vocab_size}"
    )
    return message, f"set Model.vocab_size: {metadata.vocab_size}, or use other data"


def tokenizer_beside(metadata: Metadata) -> Tokenizer:
    """The tokenizer of prepared data. Raises UserError if it is missing or another one."""
    source = "bytes" if metadata.tokenizer["kind"] == "bytes" else metadata.file.parent / FOLDER
    tokenizer = open_tokenizer(str(source))
    require_same(tokenizer, metadata.tokenizer, str(metadata.file))
    return tokenizer


def require_same(tokenizer: Tokenizer, recorded: dict[str, Any], where: str) -> None:
    if tokenizer.digest != recorded["digest"]:
        message = f"this is not the tokenizer of {where}: its files differ"
        raise UserError(message, "use the tokenizer with which the data was prepared")


def is_part_of(folder: Path, files: Iterable[Path]) -> bool:
    """Whether a folder has only copies of these files: not all, if copying them failed."""
    sources = {file.name: file for file in files}
    # A killed process leaves `tokenizer.json.part123`, see `replacing`.
    foreign = {name for name in os.listdir(folder) if name.partition(".part")[0] not in sources}
    copied = [name for name in sources if os.path.lexists(folder / name)]
    return not foreign and all(_is_copy(folder / name, sources[name]) for name in copied)


def _is_copy(file: Path, source: Path) -> bool:
    with suppress(OSError):
        return read_bytes(file, _LARGEST * 4) == read_bytes(source, _LARGEST * 4)
    return False


def copy_tokenizer(files: Iterable[Path], folder: Path) -> None:
    """Copy the files of a tokenizer into a folder. Does nothing if they are there already."""
    for file in files:
        if not _is_copy(folder / file.name, file):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / file.name) as stream:
                stream.write(read_bytes(file, _LARGEST * 4))
