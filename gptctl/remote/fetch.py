"""Copy what a job has written on its ssh hosts to this machine; resume an interrupted copy.

In a checkpoint, files of the same name on several hosts are copies of each other. Other files of
the same name are kept apart: the first host's at their usual place, those of host X in `hosts/X`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gptctl.engine.atomic_files import private_files
from gptctl.jobs.store import JobRecord
from gptctl.remote.copy_files import Part, copy_rest, is_up_to_date, resume
from gptctl.remote.host_error import HostError
from gptctl.remote.host_sync import HostSync, is_synced
from gptctl.remote.link import LinkConnection
from gptctl.remote.log_sync import LogSync
from gptctl.reporting import Fetched, Progress, Say, ShowProgress
from trainer.checksums import damage_in
from trainer.errors import OUT_OF_REACH, UserError

CHECKPOINT = re.compile(r"step_\d+(\.aside\d+)?")
# Unfinished checkpoints, and names that would lead out of the target folder.
SKIPPED = re.compile(
    r"step_\d+(\.aside\d+)?\.(tmp|old)|\.lock|\.owner.*|__pycache__|\.{0,2}|.*/.*", re.DOTALL
)
MISSING = "missing"
SAME_EVERYWHERE = "latest"  # contains the name of the newest checkpoint
MAX_NAME = 255  # bytes of a file name on most file systems
TRIES = 5  # after a lost connection; each continues where the one before stopped


class FileDisappeared(Exception):
    """A file was removed after it was listed."""


def fetch(
    record: JobRecord,
    sync: LogSync,
    target: str | None,
    checkpoints: bool,
    say: Say,
    show: ShowProgress,
) -> Fetched:
    """Copy logs, outputs and, if wanted, checkpoints of all hosts; verify the checkpoints."""
    # Before the first byte: a part of a checkpoint is useless without the parts of other hosts.
    sync.refresh()
    if unreachable := sync.unreachable():
        message = f"{record.id} cannot be fetched completely: {'; '.join(unreachable)}"
        raise UserError(message, "fetch it again when the hosts are reachable", OUT_OF_REACH)
    # Without a target, the files complete the folder that already has the logs.
    here = Path(target).absolute() if target else record.run_folder
    try:
        with private_files():
            here.mkdir(parents=True, exist_ok=True)
            parts = _all_parts(sync.with_files, here, checkpoints, say)
            new: Parts = {local: item for local, item in parts.items() if not _is_here(*item)}
            # Known before the first byte, for the progress bar.
            total = sum(_num_missing(part) for _, part in new.values())
            with show(f"fetching {record.id}", total) as done:
                _copy_all(parts, new, say, done)
    except OSError as error:
        message = f"{error.filename or here} cannot be written: {error.strerror}"
        raise UserError(message, "choose another folder with --to", OUT_OF_REACH) from None
    _check(here)
    return _summary(parts, new, here)


Parts = dict[Path, tuple[HostSync, Part]]


def _summary(parts: Parts, new: Parts, here: Path) -> Fetched:
    sizes = {local: part.size for local, (_, part) in parts.items()}
    # Without what was removed on its host before it could be copied.
    new_sizes = [sizes[local] for local in new if local in sizes]
    return Fetched(len(sizes), sum(sizes.values()), str(here), len(new_sizes), sum(new_sizes))


def _all_parts(hosts: list[HostSync], here: Path, checkpoints: bool, say: Say) -> Parts:
    """Decide for every file which host it is copied from, and where to."""
    parts: Parts = {}
    for host in hosts:
        for part in _files_of(host, here, checkpoints, say):
            is_same = _is_of_checkpoint(part.local) or part.local.name == SAME_EVERYWHERE
            if part.local in parts and not is_same:
                own = here / "hosts" / host.route.name / part.local.relative_to(here)
                parts[own] = host, part._replace(local=own)
            else:
                parts.setdefault(part.local, (host, part))
    return parts


def _files_of(host: HostSync, here: Path, checkpoints: bool, say: Say) -> Iterator[Part]:
    """List the logs, and the output of the trainer or the new files in a script's folder."""
    plan, own = host.plan, host.record.run_folder
    with host.connected() as connection:
        yield from _below(connection, plan.log_dir, here / "logs", checkpoints, say)
        if plan.output_dir:
            yield from _below(connection, plan.output_dir, here / "output", checkpoints, say)
            return
        for part in _below(connection, plan.work_dir, here / "work", checkpoints, say):
            # Files that were sent with the job are already here.
            sent = own / "code" / part.local.relative_to(here / "work")
            if not is_up_to_date(part._replace(local=sent)):
                yield part


def _below(
    connection: LinkConnection, remote: str, local: Path, checkpoints: bool, say: Say
) -> Iterator[Part]:
    links = []
    for entry in connection.listed(remote):
        if SKIPPED.fullmatch(entry.name) or "\0" in entry.name:
            continue
        if CHECKPOINT.fullmatch(entry.name) and not checkpoints:
            continue
        if stat.S_ISDIR(entry.mode):
            yield from _below(
                connection, f"{remote}/{entry.name}", local / entry.name, checkpoints, say
            )
        elif stat.S_ISREG(entry.mode):
            yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)
        # Links and devices: following them could copy any file of the host.
        else:
            links.append(entry.name)
    if links:
        where = f"{connection.route.name}:{remote}"
        say(f"not copied from {where}, since they are not regular files: {', '.join(links)}")


def _is_of_checkpoint(file: Path) -> bool:
    return bool(CHECKPOINT.fullmatch(file.parent.name))


def _copy_all(parts: Parts, new: Parts, say: Say, done: Progress) -> None:
    """Copy the new files; leave out a checkpoint that is removed meanwhile."""
    # A running job removes old checkpoints. A part of one must not look like a whole one.
    removed: set[Path] = set()
    for host, part in new.values():
        try:
            if part.local.parent not in removed:
                _copy(host, part, say, done)
        except FileDisappeared:
            removed.add(part.local.parent)
    for folder in removed:
        incomplete = [
            local
            for local in parts
            if local.parent == folder and (_is_of_checkpoint(local) or not local.exists())
        ]
        for local in incomplete:
            local.unlink(missing_ok=True)
            del parts[local]


def _copy(host: HostSync, part: Part, say: Say, done: Progress) -> None:
    """Copy one file; after a lost connection, continue where it stopped."""
    # A follower may have copied it meanwhile.
    if _is_here(host, part):
        return
    unfinished = _unfinished(part)
    part.local.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(TRIES)):
        try:
            _resume_copy(host, part, unfinished, done)
            break
        except HostError as error:
            # Only a lost connection can succeed at the next try.
            if not error.is_lost or not tries_left:
                raise
            say(f"{error.message}; trying again …")
            host.wait_for_next_try()
    # Size and time are how the next fetch knows that this file is complete.
    os.utime(unfinished, (part.changed, part.changed))
    unfinished.replace(part.local)


def _unfinished(part: Part) -> Path:
    # With the time of the file: a newer version must not continue the copy of an older one.
    ending, name = f".{part.changed}.part", os.fsencode(part.local.name)
    if len(name) + len(ending) > MAX_NAME:
        name = hashlib.sha256(name).hexdigest().encode()
    return part.local.with_name(os.fsdecode(name) + ending)


def _num_missing(part: Part) -> int:
    """Return how many bytes of a file must still be copied."""
    unfinished = _unfinished(part)
    copied = unfinished.stat().st_size if unfinished.exists() else 0
    return part.size - copied if copied <= part.size else part.size


def _is_here(host: HostSync, part: Part) -> bool:
    """Whether the copy is complete, or log_sync keeps it up to date."""
    # A follower would show a file that is replaced again from its start.
    is_in_own_folder = part.local.is_relative_to(host.record.run_folder)
    is_followed = is_in_own_folder and is_synced(part.local.name) and part.local.exists()
    return is_followed or is_up_to_date(part)


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


def _opened(connection: LinkConnection, part: Part) -> Any:
    try:
        return connection.files.open(os.fsencode(part.remote), "rb")
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
        except (ValueError, KeyError, TypeError, AttributeError):
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
    files: dict[str, Any] = json.loads(manifest.read_bytes())["files"]
    return files
