"""Shell scripts that run on other machines: templates/remote, which users cannot replace."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import cache

from gptctl.spec.resources import folder

# --norc: bash that is started by sshd would read ~/.bashrc, which is meant for terminals.
BASH = ("bash", "--norc", "-c")
# Starts a login shell: Slurm's commands may be found only there. What the user's profile prints
# goes to stderr, and descriptor 3 is the real stdout.
_LOGIN_BASH = (*BASH, 'exec 3>&1 1>&2; exec bash -l -c "$0" gptctl "$@"')
# Printed before the output of a command: a login shell may print something of its own first.
START_MARKER = "gptctl begins"
_USES = re.compile(r"^# uses (\S+)$", re.MULTILINE)
# After these the command continues in the next line. The last one is a pattern of `case`.
_OPEN_END = re.compile(r"(\bthen|\bdo|\belse|\bin|[{(|&]|;;|^[^()]*\))$")


def command_line(command: Sequence[str]) -> str:
    """The command as the login shell of a host gets it, with the marker before its output."""
    return f"echo {shlex.quote(START_MARKER)}; {shlex.join(command)}"


def output_of(printed: bytes) -> bytes | None:
    """What a command printed, without what the login shell printed before.

    None if the shell exited before it ran the command; its exit code is then meaningless.
    """
    _, marker, output = printed.partition(f"{START_MARKER}\n".encode())
    return output if marker else None


def remote_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a script of templates/remote with these arguments."""
    return [*BASH, in_one_line(name), "gptctl", *arguments]


def login_command(*command: str, marker: str = "") -> list[str]:
    """Return the command that runs another one in the environment of a login."""
    mark = f"{_marked(marker)}; " if marker else ""
    return [*_LOGIN_BASH, f'{mark}exec "$@" >&3 3>&-', *command]


def _marked(marker: str) -> str:
    return f"echo '{marker}' >&3; echo '{marker}' >&2"


def login_script(name: str, *arguments: str) -> list[str]:
    """Like `remote_command`, in the environment of a login, with the marker."""
    return [
        *_LOGIN_BASH,
        f"{_marked(START_MARKER)}; exec >&3 3>&-; {in_one_line(name)}",
        *arguments,
    ]


def login_output(stdout: bytes) -> bytes | None:
    """Return what such a command printed to stdout; None if the login shell never came to it."""
    # A profile may exit, or replace the shell by another one that reads our empty stdin.
    before, marker, output = stdout.partition(f"{START_MARKER}\n".encode())
    return output if marker and not before else None


def after_login(stderr: str) -> str:
    """Return what such a command printed, without what the profile printed before."""
    before, marker, after = stderr.partition(START_MARKER)
    return after.strip() if marker else before


@cache
def in_one_line(name: str) -> str:
    """Return a script without comments, in one line."""
    # Not every login shell accepts a quoted line end (csh does not).
    text = (folder("templates") / "remote" / name).read_text(encoding="utf-8")
    used = [in_one_line(other) + "; " for other in _USES.findall(text)]
    return "".join(used) + _joined(text)


def _joined(text: str) -> str:
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    joins = [" " if _OPEN_END.search(line) else "; " for line in lines[:-1]]
    return "".join(part for pair in zip(lines, [*joins, ""]) for part in pair)
