"""The files that pin host keys: which keys they hold, and how a new one is added."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptctl.remote.host_error import HostError
from trainer.errors import OUT_OF_REACH, UserError

SSH_PORT = 22
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_HASHED = re.compile(r"\|1\|[A-Za-z0-9+/]{27}=\|[A-Za-z0-9+/]{27}=")


def key_name(host: str, port: int) -> str:
    """The name under which a host's key is pinned."""
    return host if port == SSH_PORT else f"[{host}]:{port}"


def pinning_file(known_hosts: Sequence[str]) -> str:
    return known_hosts[0] if known_hosts else SYSTEM_KNOWN_HOSTS


def pinned_keys(host: str, files: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Names, type and key of every line, except revoked keys; a line that makes no sense pins nothing."""
    lines = [line for file in (*files, SYSTEM_KNOWN_HOSTS) for line in _lines(host, file)]
    revoked = {
        line.split()[3] for line in lines if line.startswith("@revoked ") and len(line.split()) > 3
    }
    for line in lines:
        words = line.split()
        if len(words) > 2 and not line.startswith(("#", "@")) and words[2] not in revoked:
            names = [
                name
                for name in words[0].split(",")
                if not name.startswith("|") or _HASHED.fullmatch(name)
            ]
            yield names, words[1], words[2]


def _lines(host: str, file: str) -> list[str]:
    try:
        if not os.path.isfile(file):
            return []
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        hint = "fix it, or see known_hosts in the profile"
        raise HostError(host, f"{file} cannot be read: {error.strerror}", hint) from None


def pin(known_hosts: Sequence[str], host: str, port: int, key: str) -> None:
    """Accept this key, and no other one, as this host's from now on; `key` is its type and base64 text."""
    file = Path(pinning_file(known_hosts))
    if file.exists() and not file.is_file():
        hint = "name a file as known_hosts in the profile"
        raise UserError(f"{file} is not a file", hint, OUT_OF_REACH)
    line = f"{key_name(host, port)} {key}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as stream:
            stream.write(line if not before or before.endswith("\n") else f"\n{line}")
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}"
        raise UserError(message, "see known_hosts in the profile", OUT_OF_REACH) from None
