"""The manifest of a checkpoint: its facts, where its tensors are, and checksums of all files.

A folder without a manifest is not a checkpoint: it was not written completely.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.checksums import Damaged, FileFacts, damage_in, opened, require_size
from trainer.durable import replacing

NAME = "manifest.json"
TORCH_FORMAT = 1  # files of torch.distributed.checkpoint; this program only reads them
VERSION = 2  # one safetensors file per rank
_DATA = (".safetensors", ".distcp", ".metadata")
VERIFIED, DAMAGED = ".verified", ".damaged"  # suffixes of the empty files that record a result


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, FileFacts]) -> None:
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is damaged") from None
    if checksum != _checksum(manifest):
        raise ValueError(f"{NAME} is damaged: wrong checksum")
    if manifest["version"] not in (TORCH_FORMAT, VERSION):
        raise ValueError(
            f"unsupported format version {manifest['version']}, this program reads up to {VERSION}"
        )
    return manifest


def find_damage(folder: Path, files: Iterable[tuple[str, FileFacts]]) -> str:
    """Read these files completely. Returns what is wrong with them, or an empty string."""
    for name, facts in files:
        if damage := _invalid_name(name) or damage_in(folder / name, facts):
            return damage
    return ""


def find_missing(folder: Path, files: Iterable[tuple[str, FileFacts]]) -> str:
    """Check what costs no reading: names, sizes, and what an earlier verification found."""
    for name, facts in files:
        if damage := _invalid_name(name):
            return damage
        try:
            with opened(folder / name) as descriptor:
                require_size(descriptor, name, facts)
        except Damaged as damaged:
            return str(damaged)
        if os.path.exists(folder / f"{name}{DAMAGED}"):
            return f"{name} was damaged when it was read back after it had been written"
    return ""


def record(file: Path, is_good: bool) -> None:
    """Remember beside a file whether it was read back correctly, so that nobody has to again."""
    file.with_name(f"{file.name}{VERIFIED if is_good else DAMAGED}").touch()


def is_verified(folder: Path) -> bool:
    """Whether all files of a checkpoint were read back correctly. Opens no file."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False
    data = {name for name in names if name.endswith(_DATA)}
    return NAME in names and bool(data) and all(f"{name}{VERIFIED}" in names for name in data)


def is_damaged(folder: Path) -> bool:
    """Whether a rank found damage when it read its file back."""
    return any(folder.glob(f"*{DAMAGED}"))


def _invalid_name(name: str) -> str:
    # A crafted manifest must not make us read other files.
    is_plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
    return "" if is_plain else f"{name} is outside the folder"


def _checksum(manifest: dict[str, Any]) -> str:
    # Sorted keys, so that the checksum does not depend on the order in the file.
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
