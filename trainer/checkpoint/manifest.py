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
LARGEST = 1 << 30  # bytes of a manifest; those of a thousand ranks have about a hundredth
_DATA = (".safetensors", ".distcp", ".metadata")
VERIFIED, DAMAGED = ".verified", ".damaged"  # suffixes of the empty files that record a result


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, FileFacts]) -> None:
    manifest = {"version": VERSION, **facts, "files": dict(sorted(files.items()))}
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)
    with replacing(folder / NAME) as stream:  # a manifest exists completely or not at all
        stream.write(text.encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and verify a manifest. Raises ValueError if it is missing or damaged."""
    text = _read_text(folder / NAME)
    try:
        manifest = json.loads(text)
        is_intact = manifest.pop("checksum") == _checksum(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is damaged") from None
    if not is_intact:
        raise ValueError(f"{NAME} is damaged: wrong checksum")
    version = manifest.get("version")
    if version not in (TORCH_FORMAT, VERSION):
        raise ValueError(
            f"unsupported format version {version}, this program reads up to {VERSION}"
        )
    if not _lists_files(manifest):
        raise ValueError(f"{NAME} does not describe its files correctly")
    return manifest


def _read_text(file: Path) -> bytes:
    try:
        with opened(file) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > LARGEST:
                raise ValueError(f"{NAME} has {size} bytes, which no manifest needs")
            with open(descriptor, "rb", closefd=False) as stream:
                return stream.read(size)
    except Damaged as damage:
        raise ValueError(str(damage)) from None


def _lists_files(manifest: dict[str, Any]) -> bool:
    files = manifest.get("files")
    return isinstance(files, dict) and all(
        isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in files.values()
    )


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
