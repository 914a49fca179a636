"""Find gptctl's own files: the bundled `templates/` and `clusters/`, and the folder of its records.

Bundled files are next to the package in a checkout, and inside it in a wheel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gptctl.engine.atomic_files import private_files
from gptctl.engine.file_reading import read_text
from gptctl.engine.state_home import state_home
from trainer.errors import WRONG_USAGE, UserError, closest

LONGEST_ID = 100  # bytes of the id of an installation
_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return a bundled folder, in a wheel or in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def named_files(name: str) -> dict[str, Path]:
    """The YAML files of a bundled folder, by name without suffix, sorted."""
    return {file.stem: file for file in sorted(folder(name).glob("*.yaml"))}


def choose(what: str, name: str, files: Mapping[str, Path]) -> Path:
    """Return the file of that name. An unknown name is an error that lists the known ones."""
    if name in files:
        return files[name]
    # A misspelt name is the usual case, so the closest one comes first.
    near = closest(name, files)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"unknown {what}: {name}", f"{hint}known: {', '.join(sorted(files))}", WRONG_USAGE
    )


def home() -> Path:
    """The folder in which gptctl keeps its records: $GPTCTL_HOME, or the XDG default."""
    if chosen := os.environ.get("GPTCTL_HOME"):
        return Path(chosen).absolute()  # a job outlives the current folder
    return state_home() / "gptctl"


def installation_id() -> str:
    """A random id of this user's records, created when it is first needed."""
    # Several machines may submit to the same ssh hosts: it makes their job ids differ.
    file = home() / "mark"
    with private_files():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Mode x: of several gptctl that start at once, one creates the file and the others read it.
        with suppress(FileExistsError), open(file, "x", encoding="utf-8") as stream:
            stream.write(os.urandom(8).hex())
    # A damaged one serves as well: it only has to differ from those of other users.
    return read_text(file, LONGEST_ID)
