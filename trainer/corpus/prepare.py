"""`gptctl data prepare`: text files to token files. Torch-free; numpy is used at the end.

    sources ──blocks──> workers ──tokens, in order──> shards ──joined──> token files and metadata

The parent reads and writes; workers parse and tokenize. A shard is complete when its facts are on
disk, so after a kill the same command continues after the last complete one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checksums import FileFacts
from trainer.corpus.blocks import BLOCK, Block, Cutting, Position, blocks_of
from trainer.corpus.disk_errors import disk_errors
from trainer.corpus.encoding import Encoded, Encoder, Rules, refusal_of, typecode_of
from trainer.corpus.extras import require
from trainer.corpus.metadata import (
    ENDING,
    FOLDER,
    copy_tokenizer,
    is_part_of,
    read_metadata,
    write_metadata,
)
from trainer.corpus.outputs import (
    DTYPES,
    Joined,
    remove_parts,
    remove_token_files,
    token_files_at,
    work_of,
    write_output,
)
from trainer.corpus.progress import Progress, Report
from trainer.corpus.shards import Shard, ShardFolder, ShardWriter
from trainer.corpus.sources import Source, find_sources, require_inputs
from trainer.corpus.summary import Counts
from trainer.corpus.tokenizer import Tokenizer, identity, open_tokenizer, require_tokenizer
from trainer.corpus.workers import Workers
from trainer.durable import locked_folder
from trainer.errors import UserError

SHARD_MB = 128
CONTINUES = "run the same command again to continue after the last complete shard"


class Request(NamedTuple):
    """What the user asked for."""

    inputs: tuple[str, ...]
    output: str
    tokenizer: str = "bytes"
    eos: str | None = None  # the name of the end token; None: the tokenizer's own
    append_eos: bool = True
    input_format: str | None = None  # None: by the name of each file
    documents: str = "file"
    field: str = "text"
    output_format: str = "npy"
    dedupe: bool = False
    invalid_utf8: str = "replace"
    invalid_lines: str = "refuse"
    merge: bool = True
    workers: int | None = None  # None: one per core
    shard_mb: float = SHARD_MB
    overwrite: bool = False


class Prepared(NamedTuple):
    prefix: Path
    counts: Counts
    tokenizer: Tokenizer
    dtype: str
    files: tuple[str, ...]
    seconds: float
    resumed: int  # shards that an earlier call had made
    eos_id: int | None  # the token after each document

    def as_json(self) -> dict[str, Any]:
        return {
            "prefix": str(self.prefix),
            "files": list(self.files),
            "dtype": self.dtype,
            "tokenizer": identity(self.tokenizer),
            "eos_id": self.eos_id,
            **self.counts.as_json(),
            "bytes_per_token": self.counts.bytes_per_token,
            "seconds": self.seconds,
            "resumed_shards": self.resumed,
        }


def prepare(request: Request, report: Report = lambda _: None) -> Prepared:
    """Tokenize all inputs. If it is interrupted, the same request continues where it was."""
    require("numpy", "writing token files")  # now, not after hours
    began = time.monotonic()
    tokenizer = open_tokenizer(request.tokenizer, request.eos)
    sources = find_sources(request.inputs, request.input_format)
    prefix = Path(request.output)
    shards = ShardFolder(prefix)
    _check_name(request.output)
    _check_output(prefix, request, shards)
    shards.check()
    _check_end(request, tokenizer)
    _check_folder(prefix.parent, tokenizer)
    with disk_errors(shards.path), shards.locked():
        is_merged = request.merge and shards.merges  # of all that may be at the prefix
        # Otherwise nothing was at the prefix, see `_check_output`.
        replaces = request.overwrite or shards.has_begun
        if request.overwrite:
            shards.clear()
        remove_parts(prefix, is_merged)
        done = shards.open(_settings(request, sources, tokenizer))
        resumed = len(done)
        filling = _Filling(request, sources, tokenizer, shards, done, report)
        start = done[-1].end if done else Position()
        done += _make_shards(filling, tokenizer, start)
        remove_old = partial(_remove_output, prefix, is_merged) if replaces else lambda _: None
        prepared = _finish(request, tokenizer, shards, done, report, remove_old)
    return prepared._replace(seconds=time.monotonic() - began, resumed=resumed)


def check_request(request: Request) -> None:
    """Raise UserError if `prepare` could not start here; needs none of the libraries."""
    require_inputs(request.inputs, request.input_format)
    require_tokenizer(request.tokenizer, request.eos)
    prefix = Path(request.output)
    shards = ShardFolder(prefix)
    _check_name(request.output)
    _check_output(prefix, request, shards)
    shards.check()


def _check_name(output: str) -> None:
    """The metadata, and a run config, could not name such a file."""
    try:
        output.encode()
    except UnicodeEncodeError:
        message = f"--output {os.fsencode(output)!r} is not UTF-8"
        raise UserError(message, "use a name of UTF-8 characters") from None


def _check_output(prefix: Path, request: Request, shards: ShardFolder) -> None:
    if not prefix.name or prefix.is_dir():
        message = f"--output {request.output} is a folder"
        raise UserError(message, f"write a prefix, such as {prefix / 'corpus'}")
    if request.overwrite:
        return
    hint = "use another --output, or --overwrite to replace it"
    # With shards, an earlier call with --overwrite is to continue.
    if os.path.exists(prefix.with_name(prefix.name + ENDING)) and not shards.can_continue:
        raise UserError(f"{prefix} is already prepared", hint)
    # With shards, an earlier call checked this, and may have begun to write its own files.
    if not shards.has_begun and (found := token_files_at(prefix, request.merge)):
        raise UserError(f"{found[0]} already exists", hint)


def _check_end(request: Request, tokenizer: Tokenizer) -> None:
    if request.append_eos and tokenizer.eos_id is None:
        message = f"the tokenizer {request.tokenizer} has no end token"
        raise UserError(message, "name one with --eos TOKEN, or use --no-eos")


def _check_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the folder has the tokenizer of other data: there is one per folder."""
    beside = folder / FOLDER
    if not tokenizer.files or not os.path.isdir(beside):
        return
    if is_part_of(beside, tokenizer.files):
        return
    # Other files may have the same ids, such as those without a tokenizer_config.json.
    if {file.name for file in tokenizer.files} & set(os.listdir(beside)):
        with suppress(UserError):
            if open_tokenizer(str(beside)).digest == tokenizer.digest:
                return
    hint = "write the output to another folder: data in one folder shares a tokenizer"
    raise UserError(f"{beside} has another tokenizer", hint)


def _settings(request: Request, sources: Sequence[Source], tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides the output."""
    names = "append_eos documents field output_format dedupe merge shard_mb".split()
    return {
        "tokenizer": identity(tokenizer),
        **{name: getattr(request, name) for name in names},
        "invalid_utf8": request.invalid_utf8,
        "invalid_lines": request.invalid_lines,
        "list_of_input_files": [[_storable(path), *rest] for path, *rest in sources],
    }


def _storable(path: str) -> str:
    """JSON can have every name but one that is not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return repr(os.fsencode(path))
    return path


def _make_shards(filling: _Filling, tokenizer: Tokenizer, start: Position) -> list[Shard]:
    """Make the shards that are missing, from this position on."""
    request, sources = filling.request, filling.sources
    cutting = Cutting(request.documents, request.field, request.dedupe)
    try:
        with _encoded(request, sources, tokenizer) as encode:
            for block, encoded in encode(blocks_of(sources, cutting, start)):
                filling.add(block, encoded)
            return filling.finish(Position(len(sources)))
    except BaseException:
        filling.abandon()
        raise


@contextmanager
def _encoded(
    request: Request, sources: Sequence[Source], tokenizer: Tokenizer
) -> Iterator[Callable[[Iterator[Block]], Iterable[tuple[Block, Encoded]]]]:
    rules = Rules(
        request.field,
        request.append_eos,
        request.invalid_utf8 == "refuse",
        request.invalid_lines == "skip",
        request.dedupe,
    )
    count = request.workers or len(os.sched_getaffinity(0))
    if sum(source.size for source in sources) < BLOCK and not request.workers:
        encoder = Encoder(tokenizer, rules)  # starting processes would take longer
        yield lambda blocks: ((block, encoder.encode(block)) for block in blocks)
        return
    # The parent has little to do: it shares the cores with the workers.
    with Workers(count, request.tokenizer, request.eos, rules) as workers:
        yield workers.encoded


class _Filling:
    """Fills shards with encoded blocks, in order."""

    def __init__(
        self,
        request: Request,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        shards: ShardFolder,
        done: list[Shard],
        report: Report,
    ) -> None:
        self.request, self.sources, self.shards = request, sources, shards
        self.itemsize = 2 if typecode_of(tokenizer.vocab_size) == "H" else 4
        self.known = shards.digests(done) if request.dedupe else None
        self.made: list[Shard] = []
        self.num_done = len(done)
        self.writer: ShardWriter | None = None
        self.open_tokens = done[-1].open_tokens if done else 0
        self.documents = sum(shard.counts.documents for shard in done)
        self.report, self.began = report, time.monotonic()
        self.total = sum(source.size for source in sources)
        self.before: tuple[int, int] | None = None if done else (0, 0)
        # A document must not be cut if its end decides about it, or if shards are the output.
        self.keeps_whole = request.dedupe or not request.merge

    def _new(self) -> ShardWriter:
        number = self.num_done + len(self.made)
        return ShardWriter(self.shards.path, number, self.open_tokens, self.itemsize, self.known)

    def add(self, block: Block, encoded: Encoded) -> None:
        if encoded.refused:
            raise self._refusal(block, encoded)
        writer = self.writer = self.writer or self._new()
        writer.add(block, encoded)
        self._report(block)
        is_full = writer.input_bytes >= self.request.shard_mb * 1e6
        if is_full and not (self.keeps_whole and block.end.inside):
            self._close(writer, block.end)

    def _report(self, block: Block) -> None:
        documents = self.documents + (self.writer.counts.documents if self.writer else 0)
        if self.before is None:  # the first block of a call that continues
            self.before = (block.done, documents)
        seconds = time.monotonic() - self.began
        self.report(Progress(documents, block.done, self.total, seconds, *self.before))

    def _close(self, writer: ShardWriter, end: Position) -> None:
        shard = writer.close(end)
        self.made.append(shard)
        self.documents += shard.counts.documents
        self.open_tokens, self.writer = shard.open_tokens, None

    def abandon(self) -> None:
        """Leave the current shard incomplete."""
        if self.writer is not None:
            self.writer.abandon()

    def finish(self, end: Position) -> list[Shard]:
        if self.writer is not None:
            self._close(self.writer, end)
        return self.made

    def _refusal(self, block: Block, encoded: Encoded) -> UserError:
        assert encoded.refused
        return refusal_of(block, encoded.refused, self.sources[block.begin.source])


def _finish(
    request: Request,
    tokenizer: Tokenizer,
    shards: ShardFolder,
    done: list[Shard],
    report: Report,
    remove_old: Callable[[Container[str]], None],  # gets the names of the new files
) -> Prepared:
    """Write the output and its metadata, then delete the shards."""
    prefix, dtype = Path(request.output), DTYPES[typecode_of(tokenizer.vocab_size)]
    counts = Counts()
    for shard in done:
        counts.add(shard.counts)
    if not counts.documents:
        shards.remove()
        hint = "check the inputs, and --field or --documents"
        raise UserError(f"no documents found{_left_out(counts)}", hint)
    # First: of two calls with different tokenizers, the one that comes second writes nothing.
    _keep_tokenizer(tokenizer, prefix.parent)
    advance = _joining(report, counts.documents, work_of(done))
    Joined(shards.path, done, dtype, advance).check()
    # Unmerged shards have whole documents; one may have none, if all were copies.
    groups = [done] if request.merge else [[each] for each in done if each.counts.documents]
    files: dict[str, FileFacts] = {}
    for number, group in enumerate(groups):
        name = prefix.name if request.merge else f"{prefix.name}-{number:05d}"
        joined = Joined(shards.path, group, dtype, advance)
        files |= write_output(request.output_format, prefix.with_name(name), joined)
    remove_old(files)
    write_metadata(prefix, _metadata(request, tokenizer, dtype, counts, files))
    shards.remove()
    eos_id = tokenizer.eos_id if request.append_eos else None
    return Prepared(prefix, counts, tokenizer, dtype, tuple(files), 0.0, 0, eos_id)


def _left_out(counts: Counts) -> str:
    texts = ((counts.empty, "empty"), (counts.skipped, "invalid"))
    found = ", ".join(f"{number:,} {what}" for number, what in texts if number)
    return f" ({found})" if found else ""


def _keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer to the folder of the data. Raises UserError if there is another one."""
    if not tokenizer.files:
        return
    with locked_folder(folder):
        _check_folder(folder, tokenizer)
        copy_tokenizer(tokenizer.files, folder / FOLDER)


def _joining(report: Report, documents: int, total: int) -> Callable[[int], None]:
    """Report the bytes of shards and of token files that were read or written."""
    began, done = time.monotonic(), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        seconds = time.monotonic() - began
        report(Progress(documents, min(done, total), total, seconds, is_joining=True))

    return advance


def _metadata(
    request: Request, tokenizer: Tokenizer, dtype: str, counts: Counts, files: dict[str, Any]
) -> dict[str, Any]:
    return {
        "tokenizer": {**identity(tokenizer), "files": [file.name for file in tokenizer.files]},
        "format": request.output_format,
        "dtype": dtype,
        "eos": request.append_eos,
        "counts": counts.as_json(),
        "files": files,
    }


def _remove_output(prefix: Path, is_merged: bool, new: Container[str]) -> None:
    """Delete earlier files that are not replaced: those of another format would still be read."""
    metadata = prefix.with_name(prefix.name + ENDING)
    known = read_metadata(metadata)
    remove_token_files(prefix, known.files if known else (), is_merged, new)
    metadata.unlink(missing_ok=True)
