"""The manifest of a checkpoint: what it is, and checksums of every file and of itself. Without one it is none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "manifest.json"
VERSION = 1


def file_facts(file: Path, sync: bool = False) -> dict[str, Any]:
    """Size and checksum; `sync` also waits until the file is on the disk."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb") as stream:
        if sync:  # torch syncs its metadata before it has left Python's buffer
            os.fsync(stream.fileno())
        while block := stream.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    manifest = {"version": VERSION, **facts, "files": dict(sorted(files.items()))}
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)
    write_durably(folder / NAME, text.encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError with the reason when it is not as it was written."""
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        checksum = manifest.pop("checksum")
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{NAME} is damaged") from None
    if checksum != _checksum(manifest):
        raise ValueError(f"{NAME} is damaged: its checksum is another")
    if manifest["version"] != VERSION:
        raise ValueError(f"it has format version {manifest['version']}, this program reads {VERSION}")
    return manifest


def find_damage(folder: Path, files: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """What is wrong with these files, or nothing."""
    for name, facts in files:
        if Path(name).name != name:
            return f"{name} is outside of the folder"
        try:
            found = file_facts(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found["bytes"] != facts["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {facts['bytes']}"
        if found["sha256"] != facts["sha256"]:
            return f"{name} is damaged: its checksum is another"
    return ""


def write_durably(file: Path, content: bytes) -> None:
    """Replaces a file so that a crash leaves the old one or the new one."""
    part = file.with_name(f"{file.name}.part{os.getpid()}")
    try:
        with open(part, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
