"""The shards of an unfinished `prepare`: what is done so far, in `<PREFIX>.shards/`.

settings.json      what was asked for: only the same command may continue
shard-00000.ids    the tokens; `.lens` has the tokens per document, `.digests` hashes of documents
shard-00000.json   the facts of a complete shard, written last. Without it, the shard is made again

Torch-free and numpy-free.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.corpus.blocks import Block, Position
from trainer.corpus.encoding import Encoded
from trainer.corpus.summary import Counts, counts_of
from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import open_own, read_object

SETTINGS, LOCK = "settings.json", "lock"
_PARTS = ("ids", "lens", "digests")
_LARGEST = 1 << 28  # bytes of settings: they list all input files
DIGEST = 16  # bytes of the hash of a document


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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may write to the same shards meanwhile."""
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
        """Delete all shards; the lock stays, since this process holds it."""
        for file in self.path.iterdir():
            if file.name != LOCK:
                file.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def open(self, settings: dict[str, Any]) -> list[Shard]:
        """The complete shards of an earlier call with the same settings, if there are any."""
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        # Without a complete shard there is nothing to continue.
        if not self.has_begun or self._read(0) is None:
            self.clear()
            with replacing(self.path / SETTINGS) as stream:
                stream.write(json.dumps(settings, indent=1).encode())
            return []
        self._check_settings(settings)
        shards = [*self._complete()]
        self._delete_from(len(shards))
        return shards

    def _check_settings(self, settings: dict[str, Any]) -> None:
        before = self._settings()
        differing = [key for key in settings if before.get(key) != settings[key]]
        if differing:
            message = f"{self.path} was begun with another {differing[0].replace('_', ' ')}"
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
        for file in self.path.glob("shard-*"):
            number = file.name.removeprefix("shard-").partition(".")[0]
            if number.isdecimal() and int(number) >= first:
                file.unlink()

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
