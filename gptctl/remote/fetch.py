"""Copy what a job has written on its ssh hosts to this machine; resume an interrupted copy.

Every file has one owner (`file_owners.py`), whose file is at the usual place; those of host X that
belong to another one are in `hosts/X`. In a checkpoint, files of the same name on several hosts are
copies of each other: one is copied, that of the first host if it has one, else that of the host
whose rank the name contains.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gptctl.engine.atomic_files import private_files
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import LARGEST, MOST_VALUES, load_json, open_at_once, size_of
from gptctl.jobs.store import JobRecord
from gptctl.remote.copy_files import Part, copy_rest, is_up_to_date, resume
from gptctl.remote.fetch_listing import CHECKPOINT, Walk
from gptctl.remote.file_owners import newly_refused
from gptctl.remote.host_error import HostError
from gptctl.remote.host_sync import HostSync, is_synced
from gptctl.remote.limits import room_in
from gptctl.remote.log_sync import LogSync
from gptctl.remote.not_copied import NotCopied, NotReadable
from gptctl.remote.sftp import RemoteFile, SftpReader
from gptctl.reporting import Fetched, FetchOptions, Progress, Say, ShowProgress
from gptctl.text import enough_for, size_text
from trainer.checksums import LARGEST_MANIFEST, damage_in
from trainer.errors import OUT_OF_REACH, UserError

# Of the trainer. What a script calls step_5 is a folder like any other.
_OF_CHECKPOINT = re.compile(rf"(hosts/[^/]+/)?output/{CHECKPOINT.pattern}/[^/]+", re.DOTALL)
MISSING = "missing"
SAME_EVERYWHERE = "output/latest"  # contains the name of the newest checkpoint
UNFINISHED = ".fetching"  # files in it, which no host can name, are complete up to their size
LONGEST_PATH = 4095 - 20  # bytes; Linux has no longer ones, and temporary names are longer
TOO_LONG = "its path would be too long here"
MOST_IN_MANIFEST = 4_000_000  # values; those of a thousand ranks have about half a million
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
    left_out = NotCopied()
    if unreachable := sync.unreachable():
        message = f"{record.id} cannot be fetched completely: {'; '.join(unreachable)}"
        raise UserError(message, "fetch it again when the hosts are reachable", OUT_OF_REACH)
    # Without a target, the files complete the folder that already has the logs.
    here = Path(options.target).absolute() if options.target else record.run_folder
    try:
        with private_files():
            here.mkdir(parents=True, exist_ok=True)
            parts = _all_parts(sync.with_files, here, options, say, left_out)
            new: Parts = {local: item for local, item in parts.items() if not _is_here(*item)}
            # Known before the first byte: a host may offer any size.
            total = _leave_out_too_large(parts, new, here, options.max_size, left_out)
            with show(f"fetching {record.id}", total) as done:
                _copy_all(parts, new, here, say, done, left_out)
    except OSError as error:
        message = f"{error.filename or here} cannot be written: {error.strerror}"
        raise UserError(message, "choose another folder with --to", OUT_OF_REACH) from None
    if options.only:
        return _summary(parts, new, here, left_out.count)
    _check(here)
    # Only one host has these: they must not make the rest unusable.
    for other in sorted(here.glob("hosts/*")):
        with _as_message(say):
            _check(other, LARGEST, MOST_VALUES)
    for words in newly_refused(record.run_folder):
        say(words)
    left_out.report(say)
    return _summary(parts, new, here, left_out.count)


@contextmanager
def _as_message(say: Say) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        say(f"warning: {error.message}")


Parts = dict[Path, tuple[HostSync, Part]]


def _summary(parts: Parts, new: Parts, here: Path, num_left_out: int) -> Fetched:
    sizes = {local: part.size for local, (_, part) in parts.items()}
    # Without what was removed on its host before it could be copied.
    new_sizes = [sizes[local] for local in new if local in sizes]
    bytes_here, new_bytes = sum(sizes.values()), sum(new_sizes)
    return Fetched(len(sizes), bytes_here, str(here), len(new_sizes), new_bytes, num_left_out)


def _leave_out_too_large(
    parts: Parts, new: Parts, here: Path, max_size: int, left_out: NotCopied
) -> int:
    """Leave out the largest files until the others fit; return how many bytes are copied then."""
    groups: dict[Path, dict[Path, int]] = {}
    for local, (host, part) in new.items():
        # A part of a checkpoint is useless.
        key = local.parent if _is_of_checkpoint(local, here) else local
        size = _num_missing(part, _unfinished(here, host, part))
        groups.setdefault(key, {})[local] = size
    wanted = total = sum(sum(group.values()) for group in groups.values())
    room = room_in(here)
    for group in sorted(groups.values(), key=lambda group: -sum(group.values())):
        if total <= min(max_size, room):
            break
        total -= sum(group.values())
        for local in group:
            host, part = new.pop(local)
            del parts[local]
            why, hint = _too_large(wanted, max_size, room, here)
            what = f"{part.remote} ({size_text(part.size)})"
            left_out.add(host.route.name, what, why, hint)
    return total


def _too_large(wanted: int, max_size: int, room: int, here: Path) -> tuple[str, str]:
    """Why files are left out, and what to do."""
    if wanted > max_size:
        why = f"{size_text(wanted)} would be copied, and the limit is {size_text(max_size)}"
        return why, f"remove large files there, or raise the limit: --max-size {enough_for(wanted)}"
    why = f"{size_text(wanted)} would be copied, and {here} has room for {size_text(room)}"
    return why, "free space, or choose another folder with --to"


def _all_parts(
    hosts: list[HostSync], here: Path, options: FetchOptions, say: Say, left_out: NotCopied
) -> Parts:
    """Decide for every file which host it is copied from, and where to."""
    offers: list[tuple[HostSync, Part]] = []
    for host in hosts:
        try:
            offers += [(host, part) for part in _files_of(host, here, options, say, left_out)]
        except HostError as error:
            # Without the first host, others would become the owners of its files for ever.
            if host is hosts[0]:
                raise
            left_out.add_host(error)
    # The first host says which checkpoints there are: another one could invent some.
    saved = {part.local.parent for host, part in offers if host is hosts[0]}
    parts: Parts = {}
    for host, part in sorted(offers, key=lambda each: not _is_trusted(each[0], each[1], hosts[0])):
        name = str(part.local.relative_to(here))
        is_copied = part.local in parts
        if _OF_CHECKPOINT.fullmatch(name) or name == SAME_EVERYWHERE:
            is_saved = part.local.parent in saved
            if is_saved and is_copied:
                continue
            is_usual = is_saved and (_is_trusted(host, part, hosts[0]) or host.owns(name))
        else:
            is_usual = host.owns(name) and not is_copied
        own = here / "hosts" / host.route.name / name
        local = part.local if is_usual else own
        if len(os.fsencode(local)) > LONGEST_PATH:
            left_out.add(host.route.name, part.remote, TOO_LONG, "pack it into an archive there")
        else:
            parts[local] = host, part._replace(local=local)
    return parts


def _is_trusted(host: HostSync, part: Part, first: HostSync) -> bool:
    """Whether this host, before all others, has this file if it is one of a checkpoint."""
    return host is first or host.has_rank_of(part.local.name)


def _files_of(
    host: HostSync, here: Path, options: FetchOptions, say: Say, left_out: NotCopied
) -> Iterator[Part]:
    """List the logs, and the output of the trainer or the new files in a script's folder."""
    plan, own = host.plan, host.record.run_folder
    if not host.has_job:
        say(f"{host.route.name}: nothing of the job is there")
        return
    with host.files() as files:
        walk = Walk(files, host.route.name, options, say, left_out)
        if options.only:
            yield from walk.below(options.only.remote, Path(options.only.local))
            return
        yield from walk.below(plan.log_dir, here / "logs")
        if plan.output_dir:
            yield from walk.below(plan.output_dir, here / "output")
            return
        for part in walk.below(plan.work_dir, here / "work"):
            # Files that were sent with the job are already here.
            sent = own / "code" / part.local.relative_to(here / "work")
            if not is_up_to_date(part._replace(local=sent)):
                yield part


def _copy_all(
    parts: Parts, new: Parts, here: Path, say: Say, done: Progress, left_out: NotCopied
) -> None:
    """Copy the new files; leave out a checkpoint of which a file cannot be copied."""
    # A running job removes old checkpoints. A part of one must not look like a whole one.
    removed: set[Path] = set()
    for host, part in new.values():
        if part.local.parent in removed:
            continue
        if _is_copied(host, part, here, say, done, left_out):
            continue
        if _is_of_checkpoint(part.local, here):
            removed.add(part.local.parent)
        else:
            del parts[part.local]
    with suppress(OSError):  # something is left in it
        (here / UNFINISHED).rmdir()
    # Not those that were here before: a host must not be able to remove them.
    for local in [local for local in new if local.parent in removed]:
        local.unlink(missing_ok=True)
        parts.pop(local, None)


def _is_copied(
    host: HostSync, part: Part, here: Path, say: Say, done: Progress, left_out: NotCopied
) -> bool:
    """Copy a file; return False if it is left out."""
    name = host.route.name
    if left_out.has_host(name):
        return False
    try:
        _copy(host, part, _unfinished(here, host, part), say, done)
        return True
    except FileDisappeared:
        place = f"{name}:{one_line(part.remote)}"
        say(f"not copied: {place}, since it was removed there meanwhile")
    except NameTaken:
        place = f"{name}:{one_line(part.remote)}"
        say(f"not copied: {place}, since a file and a folder cannot have the same name")
    except NotReadable as error:
        left_out.add(name, part.remote, str(error), "check them there, and fetch again")
    except HostError as error:
        # The next file of this host would fail in the same way, after the same wait.
        if error.is_lost or host.has_silent_files:
            left_out.add_host(error)
        else:
            left_out.add(name, part.remote, error.detail, error.hint)
    return False


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
    with host.files() as files, open(unfinished, "ab", opener=open_at_once) as copy:
        _lock(copy)
        # What an earlier try copied is kept; only the rest is read.
        start = resume(copy, part.size)
        with _opened(files, part) as source, _host_refusals():
            is_complete = copy_rest(source, copy, start, part.size, done)
    if not is_complete:
        raise NotReadable("truncated while it was copied")


@contextmanager
def _host_refusals() -> Iterator[None]:
    """What a host answers to a read is not an error of a file here, which has a name."""
    try:
        yield
    except (PermissionError, FileNotFoundError) as error:
        if error.filename:
            raise
        raise NotReadable(f"cannot be read: {error.strerror}") from None


def _opened(files: SftpReader, part: Part) -> RemoteFile:
    try:
        return files.open(part.remote)
    except FileNotFoundError:
        raise FileDisappeared from None
    except PermissionError:
        raise NotReadable("no permission to read") from None


def _lock(copy: BinaryIO) -> None:
    # Two processes that append to the same file would damage it.
    try:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another gptctl is fetching {copy.name}"
        raise UserError(message, "wait for it, or choose another folder with --to") from None


def _check(
    here: Path, largest: int = LARGEST_MANIFEST, most_values: int = MOST_IN_MANIFEST
) -> None:
    """Verify the checksums of all checkpoints that were copied."""
    for manifest in sorted(here.glob("output/step_*/manifest.json")):
        try:
            damage = [
                (name, _damage(manifest.parent / os.path.basename(name), facts))
                for name, facts in _files_in(manifest, largest, most_values).items()
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


def _files_in(manifest: Path, largest: int, most_values: int) -> dict[str, Any]:
    values = load_json(manifest, largest, most_values=most_values)
    files: dict[str, Any] = values["files"]
    return files
