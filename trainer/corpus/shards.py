"""The shards of an unfinished `prepare`: what is done so far, in `<PREFIX>.shards/`.

settings.json      what was asked for: only the same command may continue
shard-00000.ids    the tokens; `.lens` has the tokens per document, `.digests` hashes of documents
shard-00000.json   the facts of a complete shard, written last. Without it, the shard is made again

Nothing else may be in this folder: all that is in it is deleted in the end. Torch-free and
numpy-free.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.corpus.blocks import Block, Position
from trainer.corpus.differences import differences
from trainer.corpus.encoding import Encoded
from trainer.corpus.summary import Counts, counts_of
from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import open_own, parse_object, read_object

SETTINGS, LOCK = "settings.json", "lock"
_PARTS = ("ids", "lens", "digests")
_LARGEST = 1 << 28  # bytes of settings: they list all input files
DIGEST = 16  # bytes of the hash of a document
# Also temporary files of a killed process, see `replacing`.
_SHARD = re.compile(rf"shard-[0-9]{{5,}}\.({'|'.join((*_PARTS, 'json'))})(\.part[0-9]+)?")
_SETTINGS = re.compile(r"settings\.json(\.part[0-9]+)?")
_HINT = "use another --output, or move the folder away"


class Shard(NamedTuple):
    """A complete shard."""

    number: int
    end: Position  # where the next one begins
    open_tokens: int  # tokens of a document that continues in the next shard
    counts: Counts
    files: dict[str, list[int]]  # part -> bytes, checksum

    def file(self, folder: Path, part: str) -> Path:
        return folder / f"shard-{self.number:05d}.{part}"


class ShardFolder:
    def __init__(self, prefix: Path) -> None:
        self.path = prefix.with_name(prefix.name + ".shards")

    @property
    def has_begun(self) -> bool:
        """Whether an earlier call began to fill it, and did not finish."""
        return os.path.lexists(self.path / SETTINGS)

    @property
    def merges(self) -> bool:
        """Whether the output of that call is one file, as far as is known."""
        return self._settings().get("merge", True) is True

    @property
    def can_continue(self) -> bool:
        """Whether the same command would continue after a complete shard."""
        return self.has_begun and self._read(0) is not None

    def check(self) -> None:
        """Raise UserError if the folder is not ours: all files in it would be deleted."""
        if not os.path.lexists(self.path):
            return
        if not stat.S_ISDIR(os.lstat(self.path).st_mode):
            what = "a symbolic link" if self.path.is_symlink() else "not a folder"
            raise UserError(f"{self.path} is {what}, but shards are written there", _HINT)
        with os.scandir(self.path) as entries:
            names = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
        shards = [name for name in names if _SHARD.fullmatch(name)]
        known = {LOCK, *shards, *filter(_SETTINGS.fullmatch, names)}
        foreign = sorted(
            name for name, is_file in names.items() if name not in known or not is_file
        )
        if foreign:
            message = f"{self.path} contains {foreign[0]}, which gptctl data prepare did not write"
            raise UserError(message, _HINT)
        # A lock alone is left by a call that was killed before it wrote its settings.
        is_ours = {"tokenizer", "list_of_input_files"} <= self._settings().keys()
        if (shards or self.has_begun) and not is_ours:
            message = (
                f"{self.path} is not the folder of an unfinished prepare: no {SETTINGS} of one"
            )
            raise UserError(message, _HINT)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may write to the same shards meanwhile."""
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = open_own(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            message = f"another command is writing to {self.path}"
            raise UserError(message, "wait until it ends, or use another --output") from None
        try:
            yield
        finally:
            os.close(lock)

    def clear(self) -> None:
        """Delete all shards. The settings stay: they say whose folder it is."""
        self._delete_from(0)

    def remove(self) -> None:
        # In this order: if this is interrupted, `check` still knows the folder.
        self.clear()
        for file in [*self.path.glob(f"{SETTINGS}*"), self.path / LOCK]:
            if file.name == LOCK or _SETTINGS.fullmatch(file.name):
                file.unlink(missing_ok=True)
        self.path.rmdir()

    def open(self, settings: dict[str, Any]) -> list[Shard]:
        """The complete shards of an earlier call with the same settings, if there are any."""
        settings = parse_object(json.dumps(settings))  # as they will be read
        # Without a complete shard there is nothing to continue.
        if not self.can_continue:
            self.clear()
            with replacing(self.path / SETTINGS) as stream:
                stream.write(json.dumps(settings, indent=1).encode())
            return []
        self._check_settings(settings)
        shards = [*self._complete()]
        self._delete_from(len(shards))
        return shards

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if different := differences(self._settings(), settings):
            message = f"{self.path} was begun with other options: {'; '.join(different)}"
            hint = "run the same command as before, or add --overwrite to begin again"
            raise UserError(message, hint)

    def _settings(self) -> dict[str, Any]:
        try:
            return read_object(self.path / SETTINGS, _LARGEST)
        except (OSError, ValueError):
            return {}

    def _complete(self) -> Iterator[Shard]:
        for number in range(1 << 32):
            shard = self._read(number)
            if shard is None:
                return
            yield shard

    def _read(self, number: int) -> Shard | None:
        try:
            facts = read_object(self.path / f"shard-{number:05d}.json")
            shard = Shard(
                number,
                Position(*facts["end"]),
                facts["open_tokens"],
                counts_of(facts["counts"]),
                facts["files"],
            )
            sizes = {part: os.path.getsize(shard.file(self.path, part)) for part in shard.files}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return shard if all(sizes[part] == shard.files[part][0] for part in sizes) else None

    def _delete_from(self, first: int) -> None:
        """Delete the shard that was not finished, and what may be left after a damaged one."""
        for name in sorted(os.listdir(self.path)):
            number = name.removeprefix("shard-").partition(".")[0]
            if _SHARD.fullmatch(name) and int(number) >= first:
                (self.path / name).unlink()

    def digests(self, shards: list[Shard]) -> set[bytes]:
        """The hashes of all documents in these shards."""
        known: set[bytes] = set()
        for shard in shards:
            data = shard.file(self.path, "digests").read_bytes()
            known.update(data[at : at + DIGEST] for at in range(0, len(data), DIGEST))
        return known


class ShardWriter:
    """Writes one shard. `known` has the hashes of documents, if copies are to be left out."""

    def __init__(
        self, folder: Path, number: int, open_tokens: int, itemsize: int, known: set[bytes] | None
    ) -> None:
        self.folder, self.number, self.open_tokens = folder, number, open_tokens
        self.itemsize, self.known = itemsize, known
        self.counts = Counts()
        self.input_bytes = self.open_bytes = 0
        self.streams: dict[str, BinaryIO] = {
            part: open(folder / f"shard-{number:05d}.{part}", "wb")  # noqa: SIM115 (see `close`)
            for part in _PARTS
        }

    def add(self, block: Block, encoded: Encoded) -> None:
        counts = self.counts
        counts.text_bytes += encoded.text_bytes
        counts.empty += encoded.empty
        counts.replaced += encoded.replaced
        counts.skipped += encoded.skipped
        self.input_bytes += len(block.data)
        if block.kind == "piece":
            self._add_piece(block, encoded)
        else:
            self._add_documents(encoded)

    def _add_documents(self, encoded: Encoded) -> None:
        if self.known is None:
            self.streams["ids"].write(encoded.ids)
            self._end_documents(encoded.lengths)
            return
        begin = 0
        for length, digest, size in zip(encoded.lengths, encoded.digests, encoded.sizes):
            end = begin + length * self.itemsize
            if self._is_new(digest, size):
                self.streams["ids"].write(encoded.ids[begin:end])
                self._end_documents([length])
            begin = end

    def _add_piece(self, block: Block, encoded: Encoded) -> None:
        self.streams["ids"].write(encoded.ids)
        self.open_tokens += sum(encoded.lengths)
        self.open_bytes += encoded.text_bytes
        if not block.ends or not (encoded.lengths or self.open_tokens):
            return
        length, self.open_tokens = self.open_tokens, 0
        size, self.open_bytes = self.open_bytes, 0
        if self.known is None or self._is_new(block.digest, size):
            self._end_documents([length])
        else:  # a copy of an earlier document, which is known only at its end
            ids = self.streams["ids"]
            ids.seek(-length * self.itemsize, os.SEEK_END)
            ids.truncate()

    def _is_new(self, digest: bytes, text_bytes: int) -> bool:
        assert self.known is not None
        if digest in self.known:
            self.counts.duplicates += 1
            self.counts.text_bytes -= text_bytes
            return False
        self.known.add(digest)
        self.streams["digests"].write(digest)
        return True

    def _end_documents(self, lengths: list[int]) -> None:
        self.streams["lens"].write(array("q", lengths).tobytes())
        self.counts.tokens += sum(lengths)
        for length in lengths:
            self.counts.add_document(length)

    def close(self, end: Position) -> Shard:
        """Make the shard complete: first its data, then its facts."""
        files = {}
        for part, stream in self.streams.items():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
            file = self.folder / f"shard-{self.number:05d}.{part}"
            files[part] = [os.path.getsize(file), checksum(file)]
        shard = Shard(self.number, end, self.open_tokens, self.counts, files)
        facts = {**shard._asdict(), "counts": self.counts.as_json()}
        with replacing(self.folder / f"shard-{self.number:05d}.json") as written:
            written.write(json.dumps(facts).encode())
        return shard

    def abandon(self) -> None:
        for stream in self.streams.values():
            try:
                stream.close()
            except OSError:  # what is buffered does not fit on the disk: it is not needed
                continue


def checksum(file: Path, advance: Callable[[int], None] = lambda _: None) -> int:
    value = 0
    with open(file, "rb") as stream:
        while data := stream.read(1 << 20):
            value = zlib.crc32(data, value)
            advance(len(data))
    return value
