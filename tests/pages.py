"""The pages of the documentation as tests see them: their blocks, and the commands that a reader would type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(^|\s+)# .*")


class Command(NamedTuple):
    line: str
    is_refused: bool = False  # the page shows an error as its answer


def pages() -> list[Path]:
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md")
    found = {page for pattern in patterns for page in ROOT.glob(pattern)}
    return sorted(page for page in found if "runs" not in page.parts)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    yield from FENCE.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[Command]:
    """The lines of bash blocks, and in console blocks those after a `$`; without comments."""
    found: list[Command] = []
    for language, body in blocks(page):
        if language == "bash":
            lines = body.replace("\\\n", " ").splitlines()
            found += [Command(line) for line in (COMMENT.sub("", line).strip() for line in lines) if line]
        elif language == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, answer = part.partition("\n")
                found.append(Command(line.strip(), answer.startswith("error: ")))
    return found


def files(page: Path) -> dict[str, str]:
    """Blocks that begin with the name of a file, such as `# run.yaml`."""
    named = ((re.match(r"# ([\w.-]+\.yaml)\n", body), body) for language, body in blocks(page) if language == "yaml")
    return {found[1]: body for found, body in named if found}
