"""Where the bundled `templates/` and `clusters/` are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.errors import WRONG_USAGE, UserError, closest

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def named_files(name: str, suffix: str = ".yaml") -> dict[str, Path]:
    """The files of a bundled folder by name, sorted."""
    return {file.stem: file for file in sorted(folder(name).glob(f"*{suffix}"))}


def choose(what: str, name: str, files: Mapping[str, Path]) -> Path:
    """The file of that name; a wrong name is answered with the nearest and with all known ones."""
    if name in files:
        return files[name]
    near = closest(name, files)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no {what} is called {name}", f"{hint}known: {', '.join(sorted(files))}", WRONG_USAGE
    )
