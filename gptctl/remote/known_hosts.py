"""Files in the known_hosts format: read the pinned host keys, and add a new one.

Knows only text; `connection.py` compares the keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptctl.engine.file_reading import DamagedFile, load_bytes, read_tail
from gptctl.remote.host_error import HostError
from trainer.errors import OUT_OF_REACH, UserError

SSH_PORT = 22
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_HASHED = re.compile(r"\|1\|[A-Za-z0-9+/]{27}=\|[A-Za-z0-9+/]{27}=")


def key_name(host: str, port: int) -> str:
    """Return the name under which a host's key is pinned, as ssh writes it."""
    return host if port == SSH_PORT else f"[{host}]:{port}"


def pinning_file(known_hosts: Sequence[str]) -> str:
    """Return the file to which new keys are added."""
    return known_hosts[0] if known_hosts else SYSTEM_KNOWN_HOSTS


def pinned_keys(host: str, files: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Yield names, type and key of every valid line, except revoked keys."""
    lines = [line for file in (*files, SYSTEM_KNOWN_HOSTS) for line in _lines(host, file)]
    # A revoked key must not be accepted, even if another line pins it.
    revoked = {
        line.split()[3] for line in lines if line.startswith("@revoked ") and len(line.split()) > 3
    }
    for line in lines:
        words = line.split()
        if len(words) > 2 and not line.startswith(("#", "@")) and words[2] not in revoked:
            # paramiko fails on a hashed name that is malformed.
            names = [
                name
                for name in words[0].split(",")
                if not name.startswith("|") or _HASHED.fullmatch(name)
            ]
            yield names, words[1], words[2]


def _lines(host: str, file: str) -> list[str]:
    try:
        # A missing file pins nothing, as with ssh.
        if not os.path.isfile(file):
            return []
        return load_bytes(Path(file)).decode("utf-8", "replace").splitlines()
    except DamagedFile as error:
        hint = "check known_hosts in the profile"
        raise HostError(host, f"{file} cannot be used: {error}", hint) from None
    except OSError as error:
        hint = "fix it, or check known_hosts in the profile"
        raise HostError(host, f"{file} cannot be read: {error.strerror}", hint) from None


def pin(known_hosts: Sequence[str], host: str, port: int, key: str) -> None:
    """Pin this key for this host; `key` is its type and base64 text."""
    file = Path(pinning_file(known_hosts))
    if file.exists() and not file.is_file():
        hint = "set known_hosts in the profile to a file"
        raise UserError(f"{file} is not a file", hint, OUT_OF_REACH)
    # Appended, never replaced: the file may be the user's own ~/.ssh/known_hosts.
    line = f"{key_name(host, port)} {key}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The last line may have no line end: do not append to it.
        before = read_tail(file, 1)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as stream:
            stream.write(line if before in (b"", b"\n") else f"\n{line}")
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}"
        raise UserError(message, "check known_hosts in the profile", OUT_OF_REACH) from None
