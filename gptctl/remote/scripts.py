"""Shell scripts that run on other machines. They are bundled in templates/remote, and users cannot replace them."""

from __future__ import annotations

import re
from functools import cache

from gptctl.spec.resources import folder

BASH = ("bash", "--norc", "-c")  # --norc: started by sshd, bash would read what is meant for people
_USES = re.compile(r"^# uses (\S+)$", re.MULTILINE)
# After these the command goes on in the next line; a case pattern ends with a parenthesis of its own.
_OPEN_END = re.compile(r"(\bthen|\bdo|\belse|\bin|[{(|&]|;;|^[^()]*\))$")


def remote_command(name: str, *arguments: str) -> list[str]:
    """The words that run a script of templates/remote with these arguments."""
    return [*BASH, one_line(name), "gptctl", *arguments]


@cache
def one_line(name: str) -> str:
    """A script without comments, in one line: not every login shell accepts quoted line ends."""
    text = (folder("templates") / "remote" / name).read_text(encoding="utf-8")
    used = [one_line(other) + "; " for other in _USES.findall(text)]
    return "".join(used) + _joined(text)


def _joined(text: str) -> str:
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    joins = [" " if _OPEN_END.search(line) else "; " for line in lines[:-1]]
    return "".join(part for pair in zip(lines, [*joins, ""]) for part in pair)
