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

from trainer.checkpoint.signing import current_keys
from trainer.checkpoint_names import DAMAGED, STEP, VERIFIED
from trainer.checkpoint_names import MANIFEST as NAME
from trainer.checksums import LARGEST_MANIFEST, Damaged, FileFacts, damage_in, opened, require_size
from trainer.durable import replacing
from trainer.input_files import explain, open_own, parse_exactly, read_bytes, replaced_surrogates

TORCH_FORMAT = 1  # files of torch.distributed.checkpoint; this program only reads them
VERSION = 2  # one safetensors file per rank
SIGNATURE = "signature"


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, FileFacts]) -> None:
    """Write a manifest. It is signed if this run has a key."""
    manifest = {"version": VERSION, **facts, "files": dict(sorted(files.items()))}
    manifest.pop(SIGNATURE, None)
    if keys := current_keys():
        manifest[SIGNATURE] = keys.signature(NAME, _canonical(manifest))
    # Over the signature, too: versions that do not know it take it for one of the facts.
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)
    with replacing(folder / NAME) as stream:  # a manifest exists completely or not at all
        stream.write(text.encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and verify a manifest, and its signature if this run has a key.

    Raises ValueError if it is missing, damaged, or not signed by somebody with the key.
    """
    data = _read(folder / NAME)
    try:
        manifest = parse_exactly(data)  # the checksum is over the text as it was written
        is_intact = manifest.pop("checksum", None) == _checksum(manifest)
    except ValueError as error:
        raise ValueError(f"{NAME} is damaged: {error}") from None
    if not is_intact:
        raise ValueError(f"{NAME} is damaged: wrong checksum")
    _require_signature(folder, manifest)
    version = manifest.get("version")
    if type(version) is not int or version not in (TORCH_FORMAT, VERSION):
        raise ValueError(
            f"unsupported format version {version}, this program reads up to {VERSION}"
        )
    if not _lists_files(manifest):
        raise ValueError(f"{NAME} does not describe its files correctly")
    cleaned: dict[str, Any] = replaced_surrogates(manifest, data)
    return cleaned


def is_signed(folder: Path) -> bool:
    """Whether the manifest of a checkpoint that was read already has a signature."""
    return SIGNATURE in parse_exactly(_read(folder / NAME))


def _require_signature(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError unless the manifest is signed for this folder, or no key is given."""
    keys, signature = current_keys(), manifest.pop(SIGNATURE, None)
    if not keys:
        return
    if objection := keys.objection(signature, NAME, _canonical(manifest)):
        raise ValueError(objection)
    # The name of the folder decides which checkpoint is the newest, but only the step inside is
    # signed. Without this, an old checkpoint could be copied to the place of the newest.
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.get("step"):
        raise ValueError(f"it is a copy of the checkpoint of step {manifest.get('step')}")


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, LARGEST_MANIFEST)
    except OSError as error:
        raise ValueError(explain(file.name, error)) from None


def _lists_files(manifest: dict[str, Any]) -> bool:
    files = manifest.get("files")
    return isinstance(files, dict) and all(map(_describes_file, files.values()))


def _describes_file(facts: object) -> bool:
    return (
        isinstance(facts, dict)
        and isinstance(facts.get("sha256"), str)
        and all(type(number) is int for number in (facts.get("bytes"), facts.get("blocks", 0)))
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
    note = file.with_name(f"{file.name}{VERIFIED if is_good else DAMAGED}")
    os.close(open_own(note, os.O_WRONLY | os.O_CREAT))


def _invalid_name(name: str) -> str:
    # A crafted manifest must not make us read other files.
    is_plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
    return "" if is_plain else f"{name} is outside the folder"


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(manifest)).hexdigest()


def _canonical(manifest: dict[str, Any]) -> bytes:
    # Sorted keys, so that checksum and signature do not depend on the order in the file.
    return json.dumps(manifest, sort_keys=True).encode()
