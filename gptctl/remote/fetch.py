"""Copy what a job has written on its ssh hosts to this machine; resume an interrupted copy.

In a checkpoint, files of the same name on several hosts are copies of each other. Every other file
has one owner (`file_owners.py`), whose file is at the usual place; those of host X that belong to
another one are in `hosts/X`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gptctl.engine.atomic_files import private_files
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import load_json, size_of
from gptctl.jobs.store import JobRecord
from gptctl.remote.copy_files import Part, copy_rest, is_up_to_date, resume
from gptctl.remote.file_owners import newly_refused
from gptctl.remote.host_error import HostError
from gptctl.remote.host_sync import HostSync, is_synced
from gptctl.remote.limits import MAX_DEPTH, room_in
from gptctl.remote.link import LinkConnection
from gptctl.remote.log_sync import LogSync
from gptctl.remote.sftp import Entry, RemoteFile, TooManyEntries
from gptctl.reporting import Fetched, FetchOptions, Progress, Say, ShowProgress
from gptctl.text import enough_for, size_text, some_of
from trainer.checksums import LARGEST_MANIFEST, damage_in
from trainer.errors import OUT_OF_REACH, UserError

CHECKPOINT = re.compile(r"step_\d+(\.aside\d+)?")
# Of the trainer. What a script calls step_5 is a folder like any other.
_OF_CHECKPOINT = re.compile(rf"(hosts/[^/]+/)?output/{CHECKPOINT.pattern}/[^/]+", re.DOTALL)
# Unfinished checkpoints, and names that would lead out of the target folder.
SKIPPED = re.compile(
    r"step_\d+(\.aside\d+)?\.(tmp|old)|\.lock|\.owner.*|__pycache__|\.{0,2}|.*/.*", re.DOTALL
)
MISSING = "missing"
SAME_EVERYWHERE = "output/latest"  # contains the name of the newest checkpoint
UNFINISHED = ".fetching"  # files in it, which no host can name, are complete up to their size
MAX_NAMED = 10  # files that one message names
TRIES = 5  # after a lost connection; each continues where the one before stopped


class FileDisappeared(Exception):
    """A file was removed after it was listed."""


class NameTaken(Exception):
    """Another file needs the name of a file for a folder, or the other way round."""


def fetch(
    record: JobRecord,
    sync: LogSync,
    options: FetchOptions,
    say: Say,
    show: ShowProgress,
) -> Fetched:
    """Copy logs, outputs and, if wanted, checkpoints of all hosts; verify the checkpoints."""
    # Before the first byte: a part of a checkpoint is useless without the parts of other hosts.
    sync.want_all()
    sync.refresh()
    if unreachable := sync.unreachable():
        message = f"{record.id} cannot be fetched completely: {'; '.join(unreachable)}"
        raise UserError(message, "fetch it again when the hosts are reachable", OUT_OF_REACH)
    # Without a target, the files complete the folder that already has the logs.
    here = Path(options.target).absolute() if options.target else record.run_folder
    try:
        with private_files():
            here.mkdir(parents=True, exist_ok=True)
            parts = _all_parts(sync.with_files, here, options, say)
            new: Parts = {local: item for local, item in parts.items() if not _is_here(*item)}
            # Known before the first byte, for the progress bar.
            total = sum(_num_missing(each[1], _unfinished(here, *each)) for each in new.values())
            _check_size(new, total, here, options.max_size)
            with show(f"fetching {record.id}", total) as done:
                _copy_all(parts, new, here, say, done)
    except OSError as error:
        message = f"{error.filename or here} cannot be written: {error.strerror}"
        raise UserError(message, "choose another folder with --to", OUT_OF_REACH) from None
    _check(here)
    # Nobody else vouches for these: they must not make the rest unusable.
    for other in sorted(here.glob("hosts/*")):
        with _as_message(say):
            _check(other)
    for words in newly_refused(record.run_folder):
        say(words)
    return _summary(parts, new, here)


@contextmanager
def _as_message(say: Say) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        say(f"warning: {error.message}")


Parts = dict[Path, tuple[HostSync, Part]]


def _summary(parts: Parts, new: Parts, here: Path) -> Fetched:
    sizes = {local: part.size for local, (_, part) in parts.items()}
    # Without what was removed on its host before it could be copied.
    new_sizes = [sizes[local] for local in new if local in sizes]
    return Fetched(len(sizes), sum(sizes.values()), str(here), len(new_sizes), sum(new_sizes))


def _check_size(new: Parts, total: int, here: Path, max_size: int) -> None:
    """Refuse to copy too much, before the first byte: a host may offer any size."""
    if not new:
        return
    host, largest = max(new.values(), key=lambda item: item[1].size)
    what = (
        f"{size_text(total)} would be copied; the largest file is {one_line(largest.remote)} of "
        f"{host.route.name}, with {size_text(largest.size)}"
    )
    if total > max_size:
        message = f"{what}. The limit is {size_text(max_size)}; nothing was copied"
        hint = f"remove the file there, or raise the limit: --max-size {enough_for(total)}"
        raise UserError(message, hint, OUT_OF_REACH)
    if total > (room := room_in(here)):
        message = f"{what}. {here} has room for {size_text(room)}; nothing was copied"
        raise UserError(message, "free space, or choose another folder with --to", OUT_OF_REACH)


def _all_parts(hosts: list[HostSync], here: Path, options: FetchOptions, say: Say) -> Parts:
    """Decide for every file which host it is copied from, and where to."""
    parts: Parts = {}
    saved: set[Path] = set()  # folders of checkpoints that the first host has
    for host in hosts:
        for part in _files_of(host, here, options, say):
            name = str(part.local.relative_to(here))
            if _OF_CHECKPOINT.fullmatch(name) or name == SAME_EVERYWHERE:
                saved |= {part.local.parent} if host is hosts[0] else set()
                # The first host says which checkpoints there are: another one could invent some.
                is_usual = part.local.parent in saved
                if part.local in parts and is_usual:
                    continue
            else:
                is_usual = host.owns(name) and part.local not in parts
            own = here / "hosts" / host.route.name / name
            local = part.local if is_usual else own
            parts[local] = host, part._replace(local=local)
    return parts


def _files_of(host: HostSync, here: Path, options: FetchOptions, say: Say) -> Iterator[Part]:
    """List the logs, and the output of the trainer or the new files in a script's folder."""
    plan, own = host.plan, host.record.run_folder
    with host.connected() as connection:
        walk = _Walk(connection, options, say)
        yield from walk.below(plan.log_dir, here / "logs")
        if plan.output_dir:
            yield from walk.below(plan.output_dir, here / "output")
            return
        for part in walk.below(plan.work_dir, here / "work"):
            # Files that were sent with the job are already here.
            sent = own / "code" / part.local.relative_to(here / "work")
            if not is_up_to_date(part._replace(local=sent)):
                yield part


class _Walk:
    """Lists the folders of one host, within the limits."""

    def __init__(self, connection: LinkConnection, options: FetchOptions, say: Say) -> None:
        self._connection, self._options, self._say = connection, options, say
        self._left = options.max_files

    def below(self, remote: str, local: Path, depth: int = 0) -> Iterator[Part]:
        if depth > MAX_DEPTH:
            raise self._refusal(f"folders are nested more than {MAX_DEPTH} levels deep: {remote}")
        others = []
        for entry in self._entries(remote):
            if SKIPPED.fullmatch(entry.name) or "\0" in entry.name:
                continue
            if CHECKPOINT.fullmatch(entry.name) and not self._options.checkpoints:
                continue
            place = f"{remote}/{entry.name}", local / entry.name
            if stat.S_ISDIR(entry.mode):
                yield from self.below(*place, depth + 1)
            elif stat.S_ISREG(entry.mode):
                yield Part(*place, entry.size, entry.changed)
            # Links and devices: following them could copy any file of the host.
            else:
                others.append(entry.name)
        if others:
            where = f"{self._connection.route.name}:{one_line(remote)}"
            names = some_of([one_line(name) for name in others], MAX_NAMED)
            self._say(f"not copied from {where}, since they are not regular files: {names}")

    def _entries(self, remote: str) -> list[Entry]:
        try:
            entries = self._connection.listed(remote, self._left)
        except PermissionError:
            raise self._refusal(f"no permission to list {remote}", "check its mode there") from None
        except TooManyEntries:
            limit = self._options.max_files
            hint = f"try --max-files {10 * limit}, or pack them into an archive there"
            raise self._refusal(f"more than {limit:,} files and folders", hint) from None
        self._left -= len(entries)
        return entries

    def _refusal(self, what: str, hint: str = "pack them into an archive there") -> HostError:
        return HostError(self._connection.route.name, f"{what}; nothing was copied", hint)


def _copy_all(parts: Parts, new: Parts, here: Path, say: Say, done: Progress) -> None:
    """Copy the new files; leave out a checkpoint that is removed meanwhile."""
    # A running job removes old checkpoints. A part of one must not look like a whole one.
    removed: set[Path] = set()
    for host, part in new.values():
        try:
            if part.local.parent not in removed:
                _copy(host, part, _unfinished(here, host, part), say, done)
        except FileDisappeared:
            removed.add(part.local.parent)
        except NameTaken:
            place = f"{host.route.name}:{one_line(part.remote)}"
            say(f"not copied: {place}, since a file and a folder cannot have the same name")
            del parts[part.local]
    with suppress(OSError):  # something is left in it
        (here / UNFINISHED).rmdir()
    incomplete = [
        local
        for local in parts
        if local.parent in removed and (_is_of_checkpoint(local, here) or not local.exists())
    ]
    for local in incomplete:
        local.unlink(missing_ok=True)
        del parts[local]


def _is_of_checkpoint(file: Path, here: Path) -> bool:
    return bool(_OF_CHECKPOINT.fullmatch(str(file.relative_to(here))))


def _copy(host: HostSync, part: Part, unfinished: Path, say: Say, done: Progress) -> None:
    """Copy one file; after a lost connection, continue where it stopped."""
    # A follower may have copied it meanwhile.
    if _is_here(host, part):
        return
    unfinished.parent.mkdir(exist_ok=True)
    _make_folder(part.local)
    for tries_left in reversed(range(TRIES)):
        try:
            _resume_copy(host, part, unfinished, done)
            break
        except HostError as error:
            # Only a lost connection can succeed at the next try. A silent host is waited for once,
            # as by every command; the next fetch continues.
            if not error.is_lost or error.is_silent or not tries_left:
                raise
            say(f"{error.message}; trying again …")
            host.wait_for_next_try()
    # Size and time are how the next fetch knows that this file is complete.
    os.utime(unfinished, (part.changed, part.changed))
    unfinished.replace(part.local)


def _make_folder(file: Path) -> None:
    """Create the folder of a file that may have any name that a host has chosen."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NameTaken from None
    if file.is_dir():
        raise NameTaken


def _unfinished(here: Path, host: HostSync, part: Part) -> Path:
    # With the time of the file: a newer version must not continue the copy of an older one.
    what = f"{host.route.name}\0{part.remote}\0{part.changed}"
    return here / UNFINISHED / hashlib.sha256(os.fsencode(what)).hexdigest()


def _num_missing(part: Part, unfinished: Path) -> int:
    """Return how many bytes of a file must still be copied."""
    copied = size_of(unfinished)
    return part.size - copied if copied <= part.size else part.size


def _is_here(host: HostSync, part: Part) -> bool:
    """Whether the copy is complete, or log_sync keeps it up to date."""
    # A follower would show a file that is replaced again from its start.
    own = host.record.run_folder
    top = part.local.relative_to(own).parts[0] if part.local.is_relative_to(own) else "work"
    is_followed = top not in ("work", "hosts") and is_synced(part.local.name)
    return (is_followed and part.local.exists()) or is_up_to_date(part)


def _resume_copy(host: HostSync, part: Part, unfinished: Path, done: Progress) -> None:
    with host.connected() as connection, open(unfinished, "ab") as copy:
        _lock(copy)
        # What an earlier try copied is kept; only the rest is read.
        start = resume(copy, part.size)
        with _opened(connection, part) as source:
            is_complete = copy_rest(source, copy, start, part.size, done)
    if not is_complete:
        message = f"{part.remote} was truncated while it was copied"
        raise HostError(host.route.name, message, "fetch again")


def _opened(connection: LinkConnection, part: Part) -> RemoteFile:
    try:
        return connection.files.open(part.remote)
    except FileNotFoundError:
        raise FileDisappeared from None
    except PermissionError:
        hint = "change its mode there, and fetch again"
        raise HostError(
            connection.route.name, f"no permission to read {part.remote}", hint
        ) from None


def _lock(copy: BinaryIO) -> None:
    # Two processes that append to the same file would damage it.
    try:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another gptctl is fetching {copy.name}"
        raise UserError(message, "wait for it, or choose another folder with --to") from None


def _check(here: Path) -> None:
    """Verify the checksums of all checkpoints that were copied."""
    for manifest in sorted(here.glob("output/step_*/manifest.json")):
        try:
            damage = [
                (name, _damage(manifest.parent / os.path.basename(name), facts))
                for name, facts in _files_in(manifest).items()
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{manifest} is damaged", "delete it and fetch again") from None
        for name, text in damage:
            if text == MISSING:
                message = f"{manifest.parent} is incomplete: no host has {name}"
                raise UserError(message, "check shared_fs in the profile")
            if text:
                message = f"{manifest.parent}: {text}"
                raise UserError(message, "delete it and fetch again")


def _damage(file: Path, facts: dict[str, Any]) -> str:
    return damage_in(file, facts) if file.exists() else MISSING


def _files_in(manifest: Path) -> dict[str, Any]:
    files: dict[str, Any] = load_json(manifest, LARGEST_MANIFEST)["files"]
    return files
