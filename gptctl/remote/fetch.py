"""Brings home what a job has written on its ssh hosts. What is complete stays, what was interrupted is gone on with.

Files of the same name on several hosts are copies of each other only in checkpoints; of others, those of the first host
come to their own place, and those of host X below `hosts/X`.
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
from gptctl.remote.connection import Connection
from gptctl.remote.host_error import HostError
from gptctl.remote.log_sync import CHUNK, MOST_AHEAD, HostSync, LogSync, Part, is_synced
from gptctl.reporting import Fetched, Progress, Say, ShowProgress
from trainer.errors import OUT_OF_REACH, UserError

CHECKPOINT = re.compile(r"step_\d+(\.aside\d+)?")
NOT_WANTED = re.compile(r"step_\d+\.(tmp|old)|\.lock|__pycache__|\.{0,2}|.*/.*", re.DOTALL)
SAME_EVERYWHERE = "latest"  # the name of the newest checkpoint
TRIES = 5  # of a host whose connection is lost; each goes on where the one before was


class Gone(Exception):
    """A file that was there a moment ago."""


def fetch(
    record: JobRecord,
    sync: LogSync,
    target: str | None,
    checkpoints: bool,
    say: Say,
    show: ShowProgress,
) -> Fetched:
    sync.refresh()
    if unreachable := sync.unreachable():
        message = f"not all of {record.id} can be fetched: {'; '.join(unreachable)}"
        raise UserError(message, "fetch again", OUT_OF_REACH)
    here = Path(target).absolute() if target else record.run_folder
    try:
        with private_files():
            here.mkdir(parents=True, exist_ok=True)
            parts = _all_parts(sync.with_files, here, checkpoints, say)
            total = sum(part.size for _, part in parts.values())
            with show(f"fetching {record.id}", total) as done:
                _copy_all(parts, say, done)
    except OSError as error:
        message = f"{error.filename or here} cannot be written: {error.strerror}"
        raise UserError(message, "choose another folder with --to", OUT_OF_REACH) from None
    _check(here)
    return Fetched(len(parts), sum(part.size for _, part in parts.values()), str(here))


Parts = dict[Path, tuple[HostSync, Part]]


def _all_parts(hosts: list[HostSync], here: Path, checkpoints: bool, say: Say) -> Parts:
    parts: Parts = {}
    for host in hosts:
        for part in _wanted(host, here, checkpoints, say):
            if (
                part.local in parts
                and not _is_of_checkpoint(part.local)
                and part.local.name != SAME_EVERYWHERE
            ):
                own = here / "hosts" / host.route.name / part.local.relative_to(here)
                parts[own] = host, part._replace(local=own)
            else:
                parts.setdefault(part.local, (host, part))
    return parts


def _wanted(host: HostSync, here: Path, checkpoints: bool, say: Say) -> Iterator[Part]:
    """Logs; what the trainer wrote, or what a script left in its folder beside the files that were sent there."""
    plan, own = host.plan, host.record.run_folder
    with host.connected() as connection:
        yield from _below(connection, plan.log_dir, here / "logs", checkpoints, say)
        if plan.output_dir:
            yield from _below(connection, plan.output_dir, here / "output", checkpoints, say)
            return
        for part in _below(connection, plan.work_dir, here / "work", checkpoints, say):
            sent = own / "code" / part.local.relative_to(here / "work")
            if not _is_here(part._replace(local=sent)):
                yield part


def _below(
    connection: Connection, remote: str, local: Path, checkpoints: bool, say: Say
) -> Iterator[Part]:
    links = []
    for entry in connection.listed(remote):
        if NOT_WANTED.fullmatch(entry.name) or "\0" in entry.name:
            continue
        if CHECKPOINT.fullmatch(entry.name) and not checkpoints:
            continue
        if stat.S_ISDIR(entry.mode):
            yield from _below(
                connection, f"{remote}/{entry.name}", local / entry.name, checkpoints, say
            )
        elif stat.S_ISREG(entry.mode):
            yield Part(f"{remote}/{entry.name}", local / entry.name, entry.size, entry.changed)
        else:
            links.append(entry.name)
    if links:
        say(
            f"left on {connection.route.name}, in {remote}, since they are no plain files: {', '.join(links)}"
        )


def _is_of_checkpoint(file: Path) -> bool:
    return bool(CHECKPOINT.fullmatch(file.parent.name))


def _copy_all(parts: Parts, say: Say, done: Progress) -> None:
    """A running job prunes old checkpoints: one that goes meanwhile does not come."""
    gone: set[Path] = set()
    for host, part in list(parts.values()):
        try:
            if part.local.parent not in gone:
                _copy(host, part, say, done)
        except Gone:
            gone.add(part.local.parent)
    for folder in gone:
        lost = [
            local
            for local in parts
            if local.parent == folder and (_is_of_checkpoint(local) or not local.exists())
        ]
        for local in lost:
            local.unlink(missing_ok=True)
            del parts[local]


def _copy(host: HostSync, part: Part, say: Say, done: Progress) -> None:
    """One file; after a lost connection it goes on where it was."""
    if _is_here(part) or _is_synced(host, part):
        done(part.size)
        return
    unfinished = part.local.with_name(
        f"{part.local.name}.{part.changed}.part"
    )  # of this version of the file
    part.local.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(TRIES)):
        try:
            _read_on(host, part, unfinished, done)
            break
        except HostError as error:
            if not error.is_lost or not tries_left:
                raise
            say(f"{error.message}; trying again …")
            host.wait_for_next_try()
    os.utime(unfinished, (part.changed, part.changed))
    unfinished.replace(part.local)


def _is_here(part: Part) -> bool:
    try:
        found = part.local.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, int(found.st_mtime)) == (part.size, part.changed)


def _is_synced(host: HostSync, part: Part) -> bool:
    """What is followed is kept up to date by whoever follows; another file in its place would be shown again."""
    is_in_own_folder = part.local.is_relative_to(host.record.run_folder)
    return is_in_own_folder and is_synced(part.local.name) and part.local.exists()


def _read_on(host: HostSync, part: Part, unfinished: Path, done: Progress) -> None:
    with host.connected() as connection, open(unfinished, "ab") as copy:
        _lock(copy)
        if copy.tell() > part.size:
            copy.truncate(0)
        at = os.fstat(copy.fileno()).st_size
        done(at)
        with _opened(connection, part) as source:
            source.seek(at)
            source.prefetch(min(part.size, MOST_AHEAD))
            while at < part.size:
                data = source.read(min(CHUNK, part.size - at))
                if not data:
                    raise HostError(
                        host.route.name, f"{part.remote} has become shorter", "fetch again"
                    )
                copy.write(data)
                at += len(data)
                done(len(data))


def _opened(connection: Connection, part: Part) -> Any:
    try:
        return connection.files.open(os.fsencode(part.remote), "rb")
    except FileNotFoundError:
        raise Gone from None
    except PermissionError:
        hint = "change its mode there, and fetch again"
        raise HostError(connection.route.name, f"{part.remote} may not be read", hint) from None


def _lock(copy: BinaryIO) -> None:
    try:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another gptctl fetches {copy.name}", "wait for it, or choose another folder"
        ) from None


def _check(here: Path) -> None:
    """Every checkpoint that came is as it was written."""
    for manifest in sorted(here.glob("output/step_*/manifest.json")):
        try:
            sums = {
                os.path.basename(name): facts["sha256"]
                for name, facts in _files_in(manifest).items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{manifest} is damaged", "delete it, and fetch again") from None
        for name, expected in sums.items():
            file = manifest.parent / name
            if not file.exists():
                raise UserError(
                    f"{manifest.parent} is not whole: {name} is on none of the hosts",
                    "see shared_fs",
                )
            if _digest(file) != expected:
                raise UserError(
                    f"{file} is damaged: its checksum is another", "delete it, and fetch again"
                )


def _files_in(manifest: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads(manifest.read_bytes())["files"]
    return files


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
