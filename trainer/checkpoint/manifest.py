"""The manifest of a checkpoint: what it is, and checksums of every file and of itself. Without one it is none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.durable import replacing

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
    with replacing(folder / NAME) as stream:
        stream.write(text.encode())


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
        raise ValueError(
            f"it has format version {manifest['version']}, this program reads {VERSION}"
        )
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


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
