"""The manifest of a checkpoint: its facts, and checksums of all files and of itself.

A folder without a manifest is not a checkpoint: it was not written completely.
"""

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
    """Size and checksum of a file; `sync` also waits until the file is on disk."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb") as stream:
        if sync:  # torch calls fsync on its metadata before Python's buffer is flushed
            os.fsync(stream.fileno())
        while block := stream.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    manifest = {"version": VERSION, **facts, "files": dict(sorted(files.items()))}
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)
    with replacing(folder / NAME) as stream:  # a manifest exists completely or not at all
        stream.write(text.encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and verify a manifest. Raises ValueError if it is missing or damaged."""
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        checksum = manifest.pop("checksum")
    except OSError as error:
        raise ValueError(f"cannot read {NAME}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{NAME} is damaged") from None
    if checksum != _checksum(manifest):
        raise ValueError(f"{NAME} is damaged: wrong checksum")
    if manifest["version"] != VERSION:
        raise ValueError(
            f"unsupported format version {manifest['version']}, this program reads {VERSION}"
        )
    return manifest


def find_damage(folder: Path, files: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """What is wrong with these files, or an empty string."""
    for name, facts in files:
        if Path(name).name != name:  # a crafted manifest must not make us read other files
            return f"{name} is outside the folder"
        try:
            found = file_facts(folder / name)
        except OSError as error:
            return f"cannot read {name}: {error.strerror}"
        if found["bytes"] != facts["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {facts['bytes']}"
        if found["sha256"] != facts["sha256"]:
            return f"{name} is damaged: wrong checksum"
    return ""


def _checksum(manifest: dict[str, Any]) -> str:
    # Sorted keys, so that the checksum does not depend on the order in the file.
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
