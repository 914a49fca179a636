"""Where files are: the bundled `templates/` and `clusters/` (next to the package in a checkout, inside it in a wheel),
and the folder in which gptctl keeps its records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gptctl.engine.atomic_files import private_files
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


def home() -> Path:
    if chosen := os.environ.get("GPTCTL_HOME"):
        return Path(chosen).absolute()
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "gptctl"


def installation_id() -> str:
    """A random id of this user's records, created when it is first needed."""
    file = home() / "mark"
    with private_files():
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(file, "x", encoding="utf-8") as stream:
            stream.write(os.urandom(8).hex())
    return file.read_text(encoding="utf-8")
