"""Shell scripts that run on other machines: templates/remote, which users cannot replace."""

from __future__ import annotations

import re
from functools import cache

from gptctl.spec.resources import folder

# --norc: bash that is started by sshd would read ~/.bashrc, which is meant for terminals.
BASH = ("bash", "--norc", "-c")
_USES = re.compile(r"^# uses (\S+)$", re.MULTILINE)
# After these the command continues in the next line. The last one is a pattern of `case`.
_OPEN_END = re.compile(r"(\bthen|\bdo|\belse|\bin|[{(|&]|;;|^[^()]*\))$")


def remote_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a script of templates/remote with these arguments."""
    return [*BASH, one_line(name), "gptctl", *arguments]


@cache
def one_line(name: str) -> str:
    """Return a script without comments, in one line."""
    # Not every login shell accepts a quoted line end (csh does not).
    text = (folder("templates") / "remote" / name).read_text(encoding="utf-8")
    used = [one_line(other) + "; " for other in _USES.findall(text)]
    return "".join(used) + _joined(text)


def _joined(text: str) -> str:
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    joins = [" " if _OPEN_END.search(line) else "; " for line in lines[:-1]]
    return "".join(part for pair in zip(lines, [*joins, ""]) for part in pair)
