"""Where the bundled `templates/` and `clusters/` are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def named_files(name: str, suffix: str = ".yaml") -> dict[str, Path]:
    """The files of a bundled folder by name, sorted."""
    return {file.stem: file for file in sorted(folder(name).glob(f"*{suffix}"))}
