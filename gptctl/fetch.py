"""Brings home what a job has written on its ssh hosts. What is complete stays, what was interrupted is gone on with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gptctl import ui
from gptctl.backends.ssh import mirror_of
from gptctl.jobs import JobRecord, private_files
from gptctl.mirror import CHUNK, GROWS, HostMirror, Part
from gptctl.ssh import Files, HostError
from trainer.errors import OUT_OF_REACH, UserError

UNFINISHED = (".tmp", ".old", ".part")
NOT_WANTED = (".lock", ".", "..")
TRIES = 5  # of a host whose connection is lost; each goes on where the one before was


class Brought(NamedTuple):
    files: int
    bytes: int
    folder: str


def bring_home(record: JobRecord, target: str | None, checkpoints: bool) -> Brought:
    mirror = mirror_of(record)
    mirror.refresh()
    if away := mirror.out_of_reach():
        raise UserError(f"not all of {record.id} can be fetched: {'; '.join(away)}", "fetch again", OUT_OF_REACH)
    here = Path(target).absolute() if target else record.run_folder
    parts: dict[Path, tuple[HostMirror, Part]] = {}
    for host in mirror.with_files:
        for part in _wanted(host, here, checkpoints):
            parts.setdefault(part.local, (host, part))  # the first host's, where several have the same
    try:
        with (
            private_files(),
            ui.progress(f"fetching {record.id}", sum(part.size for _, part in parts.values())) as done,
        ):
            _bring_all(parts, done)
    except OSError as error:
        message = f"{error.filename or here} cannot be written: {error.strerror}"
        raise UserError(message, "choose another folder with --to", OUT_OF_REACH) from None
    _check(here)
    return Brought(len(parts), sum(part.size for _, part in parts.values()), str(here))


def _bring_all(parts: dict[Path, tuple[HostMirror, Part]], done: ui.Progress) -> None:
    """A running job prunes old checkpoints: one that goes meanwhile does not come."""
    gone: set[Path] = set()
    for host, part in list(parts.values()):
        try:
            if part.local.parent not in gone:
                _bring(host, part, done)
        except FileNotFoundError:
            gone.add(part.local.parent)
    for folder in gone:
        lost = [local for local in parts if local.parent == folder and (_is_of_checkpoint(local) or not local.exists())]
        for local in lost:
            local.unlink(missing_ok=True)
            del parts[local]


def _is_of_checkpoint(file: Path) -> bool:
    return file.parent.name.startswith("step_")


def _wanted(host: HostMirror, here: Path, checkpoints: bool) -> Iterator[Part]:
    with host.connected() as connection:
        yield from _below(connection.files, host.plan.log_dir, here / "logs", checkpoints)
        if host.plan.output_dir:
            yield from _below(connection.files, host.plan.output_dir, here / "output", checkpoints)


def _below(files: Files, remote: str, local: Path, checkpoints: bool) -> Iterator[Part]:
    try:
        entries = files.listdir_attr(remote)
    except FileNotFoundError:
        return
    for entry in entries:
        name, mode = entry.filename, entry.st_mode or 0
        if name.endswith(UNFINISHED) or name in NOT_WANTED or "/" in name:
            continue
        if name.startswith("step_") and not checkpoints:
            continue
        if stat.S_ISDIR(mode):
            yield from _below(files, f"{remote}/{name}", local / name, checkpoints)
        elif stat.S_ISREG(mode):
            yield Part(f"{remote}/{name}", local / name, entry.st_size or 0, entry.st_mtime or 0)


def _bring(host: HostMirror, part: Part, done: ui.Progress) -> None:
    """One file; after a lost connection it goes on where it was."""
    if _is_here(part):
        done(part.size)
        return
    unfinished = part.local.with_name(f"{part.local.name}.part")
    part.local.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(TRIES)):
        try:
            _read_on(host, part, unfinished, done)
            break
        except HostError as error:
            if not error.is_lost or not tries_left:
                raise
            ui.say(f"{error.message}; trying again …")
    os.utime(unfinished, (part.changed, part.changed))
    unfinished.replace(part.local)


def _is_here(part: Part) -> bool:
    try:
        found = part.local.stat()
    except FileNotFoundError:
        return False
    is_same = int(found.st_mtime) == part.changed or GROWS.fullmatch(part.local.name)
    return found.st_size == part.size and bool(is_same)


def _read_on(host: HostMirror, part: Part, unfinished: Path, done: ui.Progress) -> None:
    with host.connected() as connection, open(unfinished, "ab") as copy:
        _lock(copy)
        if copy.tell() > part.size:
            copy.truncate(0)
        at = os.fstat(copy.fileno()).st_size
        with connection.files.open(part.remote, "rb") as source:
            source.seek(at)
            source.prefetch(part.size)
            while at < part.size:
                data = source.read(min(CHUNK, part.size - at))
                if not data:
                    raise HostError(host.way.name, f"{part.remote} has become shorter", "fetch again")
                copy.write(data)
                at += len(data)
                done(len(data))


def _lock(copy: BinaryIO) -> None:
    try:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another gptctl fetches {copy.name}", "wait for it, or choose another folder") from None


def _check(here: Path) -> None:
    """Every checkpoint that came is as it was written."""
    for manifest in sorted(here.glob("output/step_*/manifest.json")):
        try:
            sums = {os.path.basename(name): facts["sha256"] for name, facts in _files_in(manifest).items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{manifest} is damaged", "delete it, and fetch again") from None
        for name, expected in sums.items():
            file = manifest.parent / name
            if not file.exists():
                raise UserError(f"{manifest.parent} is not whole: {name} is on none of the hosts", "see shared_fs")
            if _digest(file) != expected:
                raise UserError(f"{file} is damaged: its checksum is another", "delete it, and fetch again")


def _files_in(manifest: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads(manifest.read_bytes())["files"]
    return files


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
