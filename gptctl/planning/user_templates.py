"""The user's own templates, read once: what is checked and trusted is what is rendered and frozen.

Each takes the place of the bundled template of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gptctl.spec.resources import folder
from gptctl.spec.trust import TEMPLATE, Source
from trainer.config.tree import MAX_BYTES, ReadFile, read_once
from trainer.errors import WRONG_USAGE, UserError
from trainer.named_tuple import NamedTuple

# Subfolders of templates/. File names are unique over all of them: users replace by name alone.
FOLDERS = ("jobs", "styles", "doctor", "parts")


class UserTemplate(NamedTuple):
    name: str
    text: str
    file: ReadFile
    is_named: bool  # on the command line; otherwise gptctl found it
    is_frozen: bool = False  # the copy of a job


def known_templates() -> list[str]:
    places = [folder("templates") / name for name in FOLDERS]
    return sorted(file.name for place in places for file in place.glob("*.j2"))


def named_templates(place: Path) -> list[UserTemplate]:
    """Read the template or the folder that the user named."""
    # It must exist and be used: falling back to the bundled one would hide a typo.
    if not place.exists():
        hint = "give a file such as launch.sh.j2, or a folder"
        raise UserError(f"unknown template: {place}", hint, WRONG_USAGE)
    if place.is_dir():
        if not (files := sorted(place.glob("*.j2"))):
            hint = "put a file such as launch.sh.j2 there"
            raise UserError(f"{place} contains no templates", hint, WRONG_USAGE)
        return [_read(file, is_named=True) for file in files]
    if place.name not in known_templates():
        hint = f"rename it to the template it replaces: {', '.join(known_templates())}"
        raise UserError(f"{place} does not replace any template", hint, WRONG_USAGE)
    return [_read(place, is_named=True)]


def found_templates(place: Path) -> list[UserTemplate]:
    """Read the templates of a folder that gptctl found beside a config."""
    files = sorted(place.glob("*.j2"))
    # Any project may have a folder `templates`: it is meant for gptctl if it has one of our names.
    if not any(file.name in known_templates() for file in files):
        return []
    return [_read(file, is_named=False) for file in files]


def frozen_templates(place: Path) -> list[UserTemplate]:
    """Read the templates in the folder of a job."""
    return [_read(file, is_named=False, is_frozen=True) for file in sorted(place.glob("*.j2"))]


def _read(path: Path, is_named: bool, is_frozen: bool = False) -> UserTemplate:
    file = read_once(path)
    if len(file.data) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "shorten it", WRONG_USAGE)
    try:
        text = file.data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8", "save the file as UTF-8", WRONG_USAGE) from None
    return UserTemplate(path.name, text, file, is_named, is_frozen)


def effective(templates: Iterable[UserTemplate]) -> dict[str, UserTemplate]:
    """The templates by name: of two with one name the first counts."""
    chosen: dict[str, UserTemplate] = {}
    for template in templates:
        chosen.setdefault(template.name, template)
    return chosen


def template_sources(templates: Sequence[UserTemplate]) -> list[Source]:
    """The templates as files that decide what runs. A job's own were trusted when it was new."""
    return [
        Source(
            TEMPLATE,
            each.file,
            "" if each.is_named else f"the bundled template {each.name}",
            is_announced=True,
        )
        for each in effective(templates).values()
        if not each.is_frozen
    ]
